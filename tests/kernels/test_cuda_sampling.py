"""Sampling on the GPU against its torch twin and against float64; into poisoned outputs, over poisoned scratch."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import cuda_sampling, sampling
from kernels.compiler import KernelError
from kernels.cuda_sampling import Sampling

INF, NAN = math.inf, math.nan
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NEAR = 2e-6  # of the whole mass: what float32 weights may move a border by

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
CUDA = torch.device("cuda")


def ops(logits: Tensor) -> Sampling:
    found = Sampling(len(logits) + 1, logits.shape[1], logits.dtype, CUDA)
    for scratch in (found._summary, found._maxima, found._above, found._arrived, found._scratch):
        scratch.fill_(-1)
    return found


def columns(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[Tensor]:
    return [
        torch.full((rows,), temperature, device=CUDA),
        torch.full((rows,), top_k, device=CUDA),
        torch.full((rows,), top_p, device=CUDA),
        torch.full((rows,), min_p, device=CUDA),
    ]


def draw(logits: Tensor, uniform: Tensor, **parameters: Any) -> Tensor:
    out = torch.full((len(logits),), -77, device=CUDA)
    return ops(logits).sample(logits, *columns(len(logits), **parameters), uniform, out)


def float64_borders(
    x: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Of one row, in float64: surviving ids ascending, cumulated shares after each, and before; whether a filter's
    border is within rounding of another choice."""
    temperature, top_p, min_p = (float(torch.tensor(v, dtype=torch.float32)) for v in (temperature, top_p, min_p))
    weight = ((x.double() - x.double().max()) / temperature).exp()
    ranked = x.float().sort(descending=True, stable=True).indices
    count, doubtful = x.numel(), False
    if min_p > 0:
        count = int((weight >= min_p).sum())
        doubtful |= bool(((weight / min_p - 1).abs() < NEAR).any())
    if 0 < top_k < x.numel():
        count = min(count, top_k)
    ranked = ranked[:count]
    if top_p < 1:
        mass = weight[ranked].cumsum(0)
        goal = top_p * mass[-1]
        last = min(int(torch.searchsorted(mass, goal)), count - 1)
        doubtful |= bool(((mass[max(last - 1, 0) : last + 1] - goal).abs() < NEAR * mass[-1]).any())
        ranked = ranked[: last + 1]
    kept = ranked.sort().values
    after = weight[kept].cumsum(0)
    return kept, after / after[-1], (after - weight[kept]) / after[-1], doubtful


def check_draw(logits: Tensor, uniform: Tensor, tokens: Tensor | None = None, **parameters: Any) -> int:
    """All tokens are those of float64, but for draws within rounding of a border, whose number is returned."""
    tokens = draw(logits, uniform, **parameters) if tokens is None else tokens
    near = 0
    for x, u, token in zip(logits, uniform.tolist(), tokens.tolist(), strict=True):
        kept, after, before, doubtful = float64_borders(x, **parameters)
        place = min(int(torch.searchsorted(after, u, right=True)), len(kept) - 1)
        if token == int(kept[place]):
            continue
        near += 1
        mine = (kept == token).nonzero()
        if not len(mine):
            assert doubtful, (token, int(kept[place]), parameters)
        elif not doubtful:
            off = max(float(before[mine]) - u, u - float(after[mine]))
            assert off < NEAR, (token, int(kept[place]), off, parameters)
    return near


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 250},
    {"top_k": 3000},
    {"top_k": 100_000, "top_p": 0.8},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.9, "temperature": 0.4},
    {"top_p": 0.99},
    {"min_p": 0.05},
    {"min_p": 0.001},
    {"min_p": 0.02, "top_p": 0.7},
    {"min_p": 0.02, "top_p": 0.7, "top_k": 20},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("parameters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [151_936, 50_257, 7, 1024, 4096])
def test_draws_are_those_of_float64(vocab: int, parameters: dict[str, Any]) -> None:
    torch.manual_seed(vocab)
    near = total = 0
    for dtype in DTYPES:
        rows = 16
        logits = (torch.randn(rows, vocab, device=CUDA) * torch.linspace(0.5, 6, rows, device=CUDA)[:, None]).to(dtype)
        logits[3, vocab // 3 :] = -INF
        logits[5] = logits[5].round()  # many ties
        logits[6] = 1.5  # nothing but ties
        uniform = torch.rand(rows, dtype=torch.float64, device=CUDA)
        uniform[0], uniform[1] = 0, 1 - 2**-53
        near += check_draw(logits, uniform, **parameters)
        total += rows
    assert near <= max(2, total // 12), f"{near} of {total} within rounding"


def shapes(rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Rows of all kinds: flat, narrow around an offset, few values, two levels, one, mostly -inf, peaked, far apart."""
    x = torch.randn(rows, vocab, device=CUDA)
    rank = torch.arange(vocab, device=CUDA)
    kinds = [
        lambda x: x,
        lambda x: 20 + x / 2,
        lambda x: x * 0.01 - 7,
        lambda x: (x * 2).round(),
        lambda x: torch.where(x > 2, 9.0, -1.5),
        lambda x: torch.zeros_like(x),
        lambda x: torch.where(rank % 37 == 5, x, -INF),
        lambda x: x * 6,
        lambda x: torch.where(rank == 77, 30.0, x + 14),
        lambda x: x * 40,
        lambda x: -rank / vocab,
    ]
    return torch.stack([kinds[i % len(kinds)](x[i]) for i in range(rows)]).to(dtype)


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 1.7},
        {"top_p": 1 - 2**-24},
        {"top_p": 0.5, "temperature": 100.0},
        {"top_p": 0.8, "min_p": 0.01},
        {"min_p": 0.3},
        {"min_p": 1e-20, "top_p": 0.95},
        {"top_k": 2000},
        {"top_k": 120_000, "top_p": 0.7, "min_p": 1e-9},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [3, 22, 60, 290])  # on 132 multiprocessors of 8, 6, 2 blocks, and of one
def test_any_distribution_any_number_of_blocks(rows: int, parameters: dict[str, Any]) -> None:
    torch.manual_seed(rows)
    for dtype in (torch.bfloat16, torch.float32):
        logits = shapes(rows, 151_936, dtype)
        uniform = torch.rand(rows, dtype=torch.float64, device=CUDA)
        tokens = draw(logits, uniform, **parameters)
        assert torch.equal(tokens, draw(logits, uniform, **parameters))
        assert torch.equal(tokens[-2:], draw(logits[-2:], uniform[-2:], **parameters))
        some = slice(0, 11) if rows < 60 else slice(7, 18)
        near = check_draw(logits[some], uniform[some], **parameters, tokens=tokens[some])
        assert near <= 2, near


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_p": 0.9},
        {"top_p": 0.97, "temperature": 0.9},
        {"top_p": 0.9, "min_p": 1e-4},
        {"top_k": 1000},
        {"top_k": 2900},  # about LIGHT candidates
        {"top_k": 1000, "temperature": 0.1},  # most weigh nothing
        {"top_k": 1500, "top_p": 0.8, "min_p": 1e-6},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whether_one_block_gathers_a_row_or_several_split_it(dtype: torch.dtype, parameters: dict[str, Any]) -> None:
    """From a nucleus of some tokens to one of thousands; neither the batch nor the blocks of a row matter."""
    torch.manual_seed(4)
    scale = torch.tensor([2.8, 3.1, 3.2, 3.3, 3.4, 3.5, 4.0, 5.0, 6.0, 12.0], device=CUDA)
    logits = (torch.randn(10, 151_936, device=CUDA) * scale[:, None]).to(dtype)
    logits[7], logits[8, 512:2048] = logits[7].round(), -INF  # ties, and parts without a finite logit
    uniform = torch.rand(10, dtype=torch.float64, device=CUDA)
    tokens = draw(logits, uniform, **parameters)
    assert check_draw(logits, uniform, tokens, **parameters) <= 2
    for rows in (1, 3, 7, 140):
        order = torch.arange(rows, device=CUDA) % 10
        assert torch.equal(draw(logits[order], uniform[order], **parameters), tokens[order]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_that_misleads_changes_nothing(dtype: torch.dtype) -> None:
    """The sample has 32 ids of each 512, all of them multiples of 4."""
    torch.manual_seed(6)
    rank, noise = torch.arange(60_000, device=CUDA), torch.randn(60_000, device=CUDA)
    unseen = torch.where(rank % 4 == 3, noise, -INF)  # more than there is room for
    light = torch.where(rank % 4 == 0, -60.0, noise / 8 - 9)  # seen without its mass
    light[5] = 0
    fewer = torch.where(rank % 512 == 0, 5 + noise / 8, noise)  # 118 above the others, not 16 times 59
    one = torch.where(rank == 31_003, noise, -INF)
    uniform = torch.tensor([0.0, 0.3, 0.8, 1 - 2**-53], dtype=torch.float64, device=CUDA)
    for x in (unseen, light, fewer, one):
        logits = x.to(dtype).repeat(140, 1)
        for parameters in ({"top_p": 0.9}, {"top_k": 280}, {"top_k": 1500, "top_p": 0.5}):
            tokens = draw(logits[:4], uniform, **parameters)
            assert check_draw(logits[:4], uniform, tokens, **parameters) <= 1, parameters
            assert torch.equal(draw(logits, uniform.repeat(35), **parameters), tokens.repeat(35)), parameters


def test_all_of_a_nucleus_can_be_drawn_and_nothing_else() -> None:
    """Sorted logits: the nucleus is a run of ids, of which the uniform numbers near 0 and 1 draw the ends."""
    vocab = 151_936
    x = (-torch.arange(vocab, device=CUDA) * 1e-4).repeat(2, 1)
    mass = x[0].double().exp().cumsum(0)
    for top_p in (0.001, 0.37, 0.9, 0.9999):
        last = int(torch.searchsorted(mass, float(torch.tensor(top_p)) * mass[-1]))
        ends = draw(x, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64, device=CUDA), top_p=top_p)
        assert int(ends[0]) == 0
        assert abs(int(ends[1]) - last) <= NEAR * float(mass[-1] / x[0, last].double().exp()) + 1


def test_draws_are_those_of_the_torch_twin() -> None:
    torch.manual_seed(1)
    rows = 64
    logits = torch.randn(rows, 32_000, device=CUDA) * 4
    uniform = torch.rand(rows, dtype=torch.float64, device=CUDA)
    mixed = [
        torch.rand(rows, device=CUDA) * 1.5,
        torch.randint(-1, 100, (rows,), device=CUDA),
        torch.rand(rows, device=CUDA) + 0.3,
        torch.rand(rows, device=CUDA) * 0.1,
    ]
    mixed[0][::5] = 0
    mine = ops(logits).sample(logits, *mixed, uniform)
    assert int((mine != sampling.sample(logits, *mixed, uniform)).sum()) <= 1


def test_exactly_k_of_tied_logits_survive_and_the_first_ids_do() -> None:
    logits = torch.zeros(1, 40_000, device=CUDA)
    logits[0, 30_000] = 0.5
    uniform = torch.tensor([1 - 2**-53], dtype=torch.float64, device=CUDA)
    for k in (2, 60, 1500, 29_999):
        tokens = {int(draw(logits, uniform * u, top_k=k)) for u in (1.0, 0.5, 0.0)}
        assert tokens >= {0, 30_000}, k
        before = draw(logits, (1.0 - uniform.new_tensor([math.exp(0.5) + 0.5]) / (k - 1 + math.exp(0.5))), top_k=k)
        assert int(before) == k - 2  # the last of the tied


def test_uniform_numbers_are_those_of_the_torch_twin() -> None:
    generator = torch.Generator(device=CUDA).manual_seed(5)
    seed, choice, position = (
        torch.randint(-(2**63), 2**63 - 1, (512,), generator=generator, device=CUDA) for _ in range(3)
    )
    seed[:4], choice[:4], position[:4] = torch.tensor([0, 1, -1, 2**40], device=CUDA), 0, torch.arange(4, device=CUDA)
    logits = torch.zeros(512, 8, device=CUDA)
    drawn = torch.full((512,), NAN, dtype=torch.float64, device=CUDA)
    tokens = ops(logits).sample(logits, *columns(512), (seed, choice, position), drawn=drawn)
    wanted = sampling.uniforms(seed, choice, position)
    assert torch.equal(drawn, wanted)
    assert torch.equal(tokens, draw(logits, wanted))


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_first_best_and_sees_what_is_not_finite(dtype: torch.dtype) -> None:
    logits = torch.randn(9, 70_001, device=CUDA).to(dtype)
    logits[0, [5, 69_000]] = 9
    logits[1, 70_000] = 10
    logits[2, 123] = NAN
    logits[3, 69_999] = INF
    logits[4] = -INF
    logits[5, 1:] = -INF
    logits[6] = -0.0
    logits[6, 7::2] = 0.0
    logits[7, 64] = -NAN
    wanted = sampling.greedy(logits.float())
    assert wanted[2:6].tolist() == [-1, -1, -1, 0]
    out = torch.full((9,), -77, device=CUDA)
    assert torch.equal(ops(logits).greedy(logits, out), wanted)
    cold = draw(logits, torch.rand(9, dtype=torch.float64, device=CUDA), temperature=0.0)
    warm = draw(logits, torch.rand(9, dtype=torch.float64, device=CUDA), top_k=5, top_p=0.9)
    assert torch.equal(cold, wanted)
    assert torch.equal(warm < 0, wanted < 0)


@pytest.mark.parametrize(
    "parameters", [{"top_p": 0.95, "temperature": 1.3}, {"top_k": 40}, {}, {"min_p": 1e-4}], ids=str
)
def test_a_row_depends_on_itself_alone(parameters: dict[str, Any]) -> None:
    torch.manual_seed(2)
    whole = torch.full((40, 152_064), NAN, device=CUDA)
    logits = whole[:, :151_936]
    logits.copy_(torch.randn(40, 151_936, device=CUDA) * 2)
    uniform = torch.rand(40, dtype=torch.float64, device=CUDA)
    tokens = draw(logits, uniform, **parameters)
    assert torch.equal(tokens, draw(logits, uniform, **parameters))
    order = torch.randperm(40, device=CUDA)
    assert torch.equal(tokens[order], draw(logits[order], uniform[order], **parameters))
    alone = torch.cat([draw(logits[i : i + 1], uniform[i : i + 1], **parameters) for i in range(40)])
    assert torch.equal(tokens, alone)


def test_penalties_and_bias() -> None:
    generator = torch.Generator(device=CUDA).manual_seed(3)
    for dtype in DTYPES:
        logits = torch.randn(5, 1003, generator=generator, device=CUDA).to(dtype)
        logits[1, 7], logits[2, 8], logits[3, 9] = NAN, INF, -INF
        places = torch.randperm(5 * 1003, generator=generator, device=CUDA)[:2000]
        places[:3] = torch.tensor([1003 + 7, 2 * 1003 + 8, 3 * 1003 + 9], device=CUDA)
        places = places.unique()
        row, token = places // 1003, places % 1003
        bias, repetition, subtract = torch.rand(3, len(places), generator=generator, device=CUDA).add(0.5).unbind()
        wanted = logits.float()
        sampling.adjust(wanted, row, token, bias, repetition, subtract)
        padded = torch.cat((row, row.new_tensor([-1]))), torch.cat((token, token.new_tensor([3])))
        more = [torch.cat((x, x.new_tensor([5.0]))) for x in (bias, repetition, subtract)]
        cuda_sampling.adjust(logits, *padded, *more)
        torch.testing.assert_close(logits, wanted.to(dtype), rtol=0, atol=0, equal_nan=True)
        sampling.forbid(wanted, row[::2].contiguous(), token[::2].contiguous())
        cuda_sampling.forbid(logits, row[::2].contiguous(), token[::2].contiguous())
        torch.testing.assert_close(logits, wanted.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [151_936, 50_257, 4096, 30])
def test_logprobs(dtype: torch.dtype, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = (torch.randn(8, vocab, device=CUDA) * 3).to(dtype)
    logits[1, 5:] = -INF
    logits[2, 3] = NAN
    logits[3] = 0.25
    logits[4, : vocab // 2] = 20  # more ties than fit in shared memory
    token = torch.randint(vocab, (8,), device=CUDA)
    token[1] = 9
    for count in (0, 1, 20):
        like = torch.full((8, count), -77.0, device=CUDA)
        out = like.new_full((8,), NAN), token.new_full((8,), -77), like.long(), like
        own, rank, ids, values = ops(logits).top_logprobs(logits, token, count, out)
        wanted = logits.double().log_softmax(-1).nan_to_num(nan=-9999.0).clamp(min=-9999)
        mine = wanted.gather(-1, token[:, None])
        torch.testing.assert_close(own.double(), mine.squeeze(-1), rtol=1e-6, atol=2e-6)
        assert torch.equal(rank, (wanted > mine).sum(-1) + 1)
        torch.testing.assert_close(values.double(), wanted.gather(-1, ids), rtol=1e-6, atol=2e-6)
        best = wanted.sort(dim=-1, descending=True, stable=True)
        good = torch.arange(8, device=CUDA) != 2
        assert torch.equal(ids[good], best.indices[good, :count])


def test_replay_of_a_graph_draws_anew_by_position() -> None:
    logits = torch.randn(6, 151_936, device=CUDA)
    found = ops(logits)
    seed, choice, position = torch.zeros(3, 6, dtype=torch.int64, device=CUDA).unbind()
    parameters = columns(6, top_k=40, top_p=0.9)
    out = found.sample(logits, *parameters, (seed, choice, position))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.sample(logits, *parameters, (seed, choice, position), out)
        result = found.top_logprobs(logits, out, 5)
    for step in range(3):
        position.fill_(step)
        logits.normal_()
        graph.replay()
        replayed, ids = out.clone(), result[2].clone()
        assert torch.equal(replayed, found.sample(logits, *parameters, sampling.uniforms(seed, choice, position)))
        assert torch.equal(ids, logits.topk(5).indices)


def test_bad_input_is_refused_before_a_launch() -> None:
    logits = torch.zeros(4, 1000, device=CUDA)
    found = ops(logits)
    uniform = torch.zeros(4, dtype=torch.float64, device=CUDA)
    with pytest.raises(KernelError, match="made for"):
        found.greedy(logits.half())
    with pytest.raises(KernelError, match="made for"):
        found.greedy(torch.zeros(6, 1000, device=CUDA))
    with pytest.raises(KernelError, match="rows packed"):
        found.greedy(torch.zeros(1000, 4, device=CUDA).T)
    with pytest.raises(KernelError, match="uniform"):
        found.sample(logits, *columns(4), uniform.float())
    with pytest.raises(KernelError, match="top_k"):
        found.sample(logits, *(c.float() for c in columns(4)), uniform)
    with pytest.raises(KernelError, match="log-probabilities"):
        found.top_logprobs(logits, torch.zeros(4, dtype=torch.int64, device=CUDA), 1001)
