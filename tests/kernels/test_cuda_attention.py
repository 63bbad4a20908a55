"""The CUDA attention kernels against float64, on NaN-poisoned pools."""

from dataclasses import replace

import pytest
import torch

from kernels import cuda_attention
from kernels.cuda_attention import DecodeAttention, PrefillAttention
from kernels.cuda_elementwise import embedding
from tools.kv_cases import Case, compare, make_case, reference

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

EIGHT_BIT = ("int8", "e4m3", "e5m2", "e4m3_scaled")
OWN = {torch.float16: "fp16", torch.bfloat16: "bf16"}
RAGGED = (0, 1, 15, 16, 17, 127, 128, 129, 1000, 4097, 31)
DEVICE = torch.device("cuda")


def pairs(dtype: torch.dtype) -> list[tuple[str, str]]:
    own = OWN[dtype]
    return [(own, own), *((name, name) for name in EIGHT_BIT), *((own, name) for name in EIGHT_BIT)]


def guarded(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An output full of NaN between two guard regions, and the whole of it."""
    whole = torch.full((len(like) + 2, *like.shape[1:]), float("nan"), dtype=like.dtype, device=like.device)
    whole[0] = whole[-1] = 7
    return whole[1:-1], whole


def decoder(case: Case) -> DecodeAttention:
    layout = case.layout
    return DecodeAttention(
        layout.k_format,
        layout.v_format,
        case.query.shape[1],
        layout.num_kv_heads,
        layout.head_dim,
        case.query.dtype,
        DEVICE,
        max_requests=len(case.lengths),
        max_queries=case.most_queries,
        window=case.window,
    )


def run_decode(case: Case, attention: DecodeAttention | None = None) -> torch.Tensor:
    attention = attention or decoder(case)
    out, whole = guarded(case.query)
    attention.plan(case.tables, case.lengths, case.query_start)
    attention(case.layout, case.pool, case.query, out)
    assert (whole[[0, -1]] == 7).all()
    assert (attention._parts == -1).all()  # as the next call needs it
    zero_idle(out, case)
    assert torch.equal(zero_idle(after_an_early_start(case, attention), case), out)
    return out


def zero_idle(out: torch.Tensor, case: Case) -> torch.Tensor:
    """Nothing is written for requests of length 0; the reference has zeros there."""
    idle = torch.repeat_interleave(case.lengths == 0, case.query_start.diff())
    assert out[idle].isnan().all()
    out[idle] = 0
    return out


def after_an_early_start(case: Case, attention: DecodeAttention) -> torch.Tensor:
    """The same once more, which starts while the queries are being written: the first call after a plan does not."""
    table = case.query.flatten(1).contiguous()
    query, out = torch.full_like(table, torch.nan), torch.full_like(case.query, torch.nan)
    embedding(torch.arange(len(table), device="cuda"), table, query)
    attention(case.layout, case.pool, query.view_as(case.query), out)
    return out


def run_prefill(case: Case, portable: bool = False) -> torch.Tensor:
    layout = case.layout
    attention = PrefillAttention(
        layout.k_format,
        layout.v_format,
        case.query.shape[1],
        layout.num_kv_heads,
        layout.head_dim,
        case.query.dtype,
        DEVICE,
        window=case.window,
        portable=portable,
    )
    out, whole = guarded(case.query)
    attention(layout, case.pool, case.query, out, case.tables, case.lengths, case.query_start)
    assert (whole[[0, -1]] == 7).all()
    return out


def check(out: torch.Tensor, case: Case) -> None:
    found = compare(out, reference(case))
    limit = 1e-2 if case.query.dtype == torch.bfloat16 else 2e-3
    assert found["cosine"] >= 0.99999, found
    assert found["relative_error"] <= limit, found


@pytest.mark.parametrize("dtype", OWN)
def test_decode_of_every_format(dtype: torch.dtype) -> None:
    for k, v in pairs(dtype):
        case = make_case(k, v, RAGGED, dtype=dtype, counts=[1] * len(RAGGED), heads=16, kv_heads=2)
        check(run_decode(case), case)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (14, 2), (8, 1), (10, 1), (32, 1)])
def test_decode_of_every_head_dim_and_group(head_dim: int, heads: int, kv_heads: int) -> None:
    for k, v in (("bf16", "bf16"), ("int8", "int8"), ("bf16", "e4m3"), ("e5m2", "e5m2")):
        case = make_case(
            k, v, (700, 33, 1), dtype=torch.bfloat16, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=32
        )
        check(run_decode(case), case)


@pytest.mark.parametrize("queries", [2, 5, 16])
def test_decode_of_several_queries(queries: int) -> None:
    lengths = (queries, 16 + queries, 1000, 257, 3000, 0)
    counts = [queries, queries - 1, 1, queries, queries, 0]
    for k, v in (("fp16", "fp16"), ("int8", "int8"), ("e4m3", "e4m3"), ("fp16", "e4m3_scaled")):
        case = make_case(k, v, lengths, dtype=torch.float16, counts=counts, heads=14)
        check(run_decode(case), case)


@pytest.mark.parametrize(("requests", "kv_heads"), [(128, 2), (128, 4), (300, 2), (300, 4)])
def test_decode_of_many_short_requests(requests: int, kv_heads: int) -> None:
    lengths = [(192, 1, 15, 230, 16, 17, 0, 63)[i % 8] for i in range(requests)]
    for k in ("bf16", "int8", "e4m3"):
        case = make_case(
            k, k, lengths, dtype=torch.bfloat16, counts=[1] * requests, heads=7 * kv_heads, kv_heads=kv_heads
        )
        check(run_decode(case), case)


@pytest.mark.parametrize("queries", [1, 3])  # 3: 21 rows of a KV head are two row blocks, and a block has four warps
@pytest.mark.parametrize("pairs", [0.9, 1.3, 2, 2.7, 5.2, 8, 8.1])  # of a request and a row block, for each block
def test_blocks_take_short_requests_side_by_side(pairs: float, queries: int) -> None:
    warps, heads = (8, 2) if queries == 1 else (4, 4)
    for k, longest in (("bf16", 20), ("e4m3", 64), ("bf16", 65)):  # tiles
        small = make_case(k, k, (queries,), dtype=torch.bfloat16, counts=(queries,), heads=14)
        grid = decoder(small)._grid
        requests = int(pairs * grid / heads)
        lengths = [16 * longest, *(i * 37 % (16 * longest - 3) + 3 for i in range(1, requests))]
        counts = [queries - i % queries for i in range(requests)]
        case = make_case(k, k, lengths, dtype=torch.bfloat16, counts=counts, heads=14)
        attention = decoder(case)
        check(run_decode(case, attention), case)
        most = -(-requests * heads // grid)
        assert attention._plan[2] == (longest * warps <= 64 * most * (warps // most))


@pytest.mark.parametrize("longest", [20, 100, 1200])  # tiles: side by side; cut, for a block a multiprocessor; for all
def test_idle_requests_cost_no_work(longest: int) -> None:
    busy = [16 * longest, 5, 16 * longest, 1, 333]
    for k in ("bf16", "e4m3"):
        work = []
        for lengths in (busy, [*busy, *[0] * 100], [0, *busy[:2], 0, 0, 0, *busy[2:], 0]):
            case = make_case(k, k, lengths, dtype=torch.bfloat16, counts=[1] * len(lengths), heads=16)
            attention = decoder(case)
            check(run_decode(case, attention), case)
            work.append(attention._plan[:3].tolist())
        assert work[0] == work[1] and (work[0] == work[2] or longest == 20), work


@pytest.mark.parametrize("window", [1, 16, 100])
def test_window(window: int) -> None:
    for k in ("bf16", "int8"):
        lengths = (1, 90, 200, 1000)
        for counts in ((1, 1, 1, 1), (1, 3, 2, 4)):
            case = make_case(k, k, lengths, dtype=torch.bfloat16, counts=counts, window=window)
            check(run_decode(case), case)
        case = make_case(k, k, lengths, dtype=torch.bfloat16, counts=(1, 90, 150, 300), window=window)
        for portable in (False, True):
            check(run_prefill(case, portable), case)


def test_slots_behind_the_window_are_not_read() -> None:
    case = make_case("bf16", "bf16", (1000,), dtype=torch.bfloat16, window=100)
    wanted = run_decode(case)
    case.tables[0, : (1000 - 100) // 16] = 2**30  # as if those blocks had been freed
    assert torch.equal(run_decode(case), wanted)


@pytest.mark.parametrize("first_block", [0, 100_000])
def test_shared_blocks_and_far_blocks(first_block: int) -> None:
    case = make_case(
        "bf16", "bf16", (300, 333), dtype=torch.bfloat16, first_block=first_block, shared=True, heads=8, kv_heads=4
    )
    assert first_block == 0 or case.pool.numel() > 2**31
    check(run_decode(case), case)
    case = replace(case, query_start=torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda"))
    for portable in (False, True):
        check(run_prefill(case, portable), case)


@pytest.mark.parametrize("portable", [False, True])
def test_prefill_among_other_rows_and_with_idle_requests(portable: bool) -> None:
    lengths, counts = (70, 0, 333, 5, 200), (70, 0, 33, 0, 131)
    case = make_case("bf16", "bf16", lengths, dtype=torch.bfloat16, counts=counts, heads=16)
    layout = case.layout
    attention = PrefillAttention(
        layout.k_format, layout.v_format, 16, layout.num_kv_heads, 128, case.query.dtype, DEVICE, portable=portable
    )
    query = torch.cat(
        (torch.full_like(case.query[:7], torch.nan), case.query, torch.full_like(case.query[:9], torch.nan))
    )
    out = torch.full_like(query, 7)
    attention(layout, case.pool, query, out, case.tables, case.lengths, case.query_start + 7)
    assert (out[:7] == 7).all()
    assert (out[-9:] == 7).all()
    check(out[7:-9], case)


def test_values_of_one_give_exactly_one() -> None:
    case = make_case("bf16", "bf16", (5000,), dtype=torch.bfloat16, heads=4, kv_heads=1)
    layout = case.layout
    width = layout.block_size * layout.head_dim * 2
    values = case.pool[:, layout.v_offset : layout.v_offset + width]
    values.copy_(torch.ones(width // 2, dtype=torch.bfloat16, device="cuda").view(torch.uint8).expand(len(values), -1))
    assert (run_decode(case) == 1).all()
    assert (run_prefill(case) == 1).all()


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "e4m3"])
def test_replay_with_other_lengths_is_bitwise_equal(kv_format: str) -> None:
    cases = [
        make_case(kv_format, kv_format, lengths, dtype=torch.bfloat16, counts=[1] * 4, heads=16, seed=seed)
        for seed, lengths in enumerate([(4000, 17, 900, 1), (5, 3000, 3000, 0), (1, 1, 1, 1), (16, 8000, 160, 4001)])
    ]
    blocks = max(len(case.pool) for case in cases)
    still = cases[0]
    pool = torch.zeros((blocks, still.layout.block_stride), dtype=torch.uint8, device="cuda")
    tables = torch.zeros((4, 600), dtype=torch.int32, device="cuda")
    lengths, query, out = torch.ones_like(still.lengths), torch.zeros_like(still.query), torch.zeros_like(still.query)
    attention = decoder(still)

    def step() -> None:
        attention.plan(tables, lengths, still.query_start)
        attention(still.layout, pool, query, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in cases:
        pool[: len(case.pool)] = case.pool
        tables[:, : case.tables.shape[1]] = case.tables
        lengths.copy_(case.lengths)
        query.copy_(case.query)
        out.fill_(float("nan"))
        graph.replay()
        check(zero_idle(out, case), case)
        assert torch.equal(out, run_decode(case))
        assert torch.equal(out, run_decode(case, attention))


@pytest.mark.parametrize("dtype", OWN)
def test_prefill_of_every_format(dtype: torch.dtype) -> None:
    lengths, counts = (1, 17, 100, 129, 700, 2000, 0, 64), (1, 16, 100, 65, 512, 1, 0, 64)
    for k, v in pairs(dtype):
        case = make_case(k, v, lengths, dtype=dtype, counts=counts, heads=14)
        for portable in (False, True):
            check(run_prefill(case, portable), case)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 1), (14, 2)])
def test_prefill_of_every_head_dim_and_group(head_dim: int, heads: int, kv_heads: int) -> None:
    for k, v in (("bf16", "bf16"), ("int8", "int8"), ("bf16", "e4m3"), ("e5m2", "e5m2")):
        case = make_case(
            k,
            v,
            (700, 333),
            dtype=torch.bfloat16,
            counts=(300, 333),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=32,
        )
        for portable in (False, True):
            check(run_prefill(case, portable), case)


def test_software_fp8_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for kv_format in ("e4m3", "e5m2", "e4m3_scaled"):
        case = make_case(kv_format, kv_format, (700, 333), dtype=torch.bfloat16, counts=(1, 1))
        hardware = run_decode(case), run_prefill(case)
        original = cuda_attention.variant

        def forced(*arguments: object, **options: object) -> cuda_attention.Variant:
            unit = original(*arguments, **options)  # type: ignore[arg-type]  # noqa: B023
            return replace(unit, macros=(*unit.macros, ("SOFTWARE_FP8", 1)))

        with monkeypatch.context() as patch:
            patch.setattr(cuda_attention, "variant", forced)
            software = run_decode(case), run_prefill(case)
        for a, b in zip(hardware, software, strict=True):
            check(b, case)
            assert compare(b, a.double())["relative_error"] < 3e-3


def test_decode_and_prefill_agree_on_a_tail() -> None:
    case = make_case("int8", "int8", (333, 1000), dtype=torch.float16, counts=(16, 9))
    assert compare(run_prefill(case), run_decode(case).double())["relative_error"] < 2e-3


def test_bad_arguments_raise_before_the_launch() -> None:
    case = make_case("int8", "int8", (33,), dtype=torch.float16)
    for broken in (
        replace(case, query=case.query.float()),
        replace(case, query=case.query[:, :4]),
        replace(case, tables=case.tables.long()),
        replace(case, pool=case.pool[:, 16:]),
        replace(case, lengths=case.lengths.cpu()),
    ):
        with pytest.raises(cuda_attention.KernelError):
            run_decode(broken, decoder(case))
