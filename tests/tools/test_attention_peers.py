"""Peers' attention is called as their documentation has it: stubs with their signatures check all that they are given.

Signatures as in FlashInfer 0.6.14 and in vLLM's, FlashAttention 3's and xformers' sources of 2026.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tools import bench_kernels
from tools.attention_peers import DTYPES, PEERS, Case, Peer, error_of, reference

HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 32, 16
LENGTHS = [5, 33, 16, 1, 48]
NAMES = {peer.name: peer for peer in PEERS}
KERNELS = [(peer.name, kv_format) for peer in PEERS for kv_format in peer.formats]


def one_request(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Query `[heads, head_dim]`, keys and values `[tokens, kv_heads, head_dim]`: head by head, as `query`."""
    group = len(query) // keys.shape[1]
    out = torch.empty(query.shape)
    for head, row in enumerate(query.float()):
        k, v = keys[:, head // group].float(), values[:, head // group].float()
        out[head] = (k @ row / query.shape[-1] ** 0.5).softmax(0) @ v
    return out


def all_requests(query: Tensor, k: Tensor, v: Tensor, rows: list[Tensor], lengths: list[int]) -> Tensor:
    """`rows`: the pages of each request."""
    both = [[x[pages.long()].flatten(0, 1)[:n] for x in (k, v)] for pages, n in zip(rows, lengths, strict=True)]
    return torch.stack([one_request(q, *kv) for q, kv in zip(query, both, strict=True)]).bfloat16()


def check(tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    assert (tensor.dtype, tuple(tensor.shape), tensor.stride(-1)) == (dtype, shape, 1)


class Wrapper:
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:
        check(float_workspace_buffer, torch.uint8, 128 << 20)
        assert not float_workspace_buffer.any()
        assert (kv_layout, use_cuda_graph, use_tensor_cores) == ("NHD", False, True)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        check(indptr, torch.int32, len(LENGTHS) + 1)
        check(indices, torch.int32, int(indptr[-1]))
        check(last_page_len, torch.int32, len(LENGTHS))
        assert 1 <= last_page_len.min() <= last_page_len.max() <= page_size
        assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (HEADS, KV_HEADS, HEAD_DIM, PAGE)
        self.rows = [indices[a:b] for a, b in pairwise(indptr.tolist())]
        self.lengths = [PAGE * (len(r) - 1) + int(n) for r, n in zip(self.rows, last_page_len, strict=True)]
        self.dtypes = q_data_type, kv_data_type or q_data_type

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *args: Any, out: Tensor | None = None) -> Tensor:
        check(q, self.dtypes[0], len(LENGTHS), HEADS, HEAD_DIM)
        for x in paged_kv_cache:
            check(x, self.dtypes[1], len(x), PAGE, KV_HEADS, HEAD_DIM)
            assert x.is_contiguous()
        assert out is not None
        check(out, torch.bfloat16, *q.shape)
        return out.copy_(all_requests(q, *paged_kv_cache, self.rows, self.lengths))


class FlashAttention3:
    """The functions of vllm.vllm_flash_attn and of flash_attn_interface, which share the metadata's."""

    def __init__(self) -> None:
        self.metadata = torch.zeros(3, dtype=torch.int32)

    def get_scheduler_metadata(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: Tensor,
        qkv_dtype: torch.dtype = torch.bfloat16,
        headdim_v: int | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_size: int | None = None,
        max_seqlen_k_new: int = 0,
        causal: bool = False,
    ) -> Tensor:
        assert (batch_size, max_seqlen_q, num_heads_q, num_heads_kv) == (len(LENGTHS), 1, HEADS, KV_HEADS)
        assert (headdim, page_size, causal) == (HEAD_DIM, PAGE, True)
        self.most, self.dtype = max_seqlen_k, qkv_dtype
        assert max_seqlen_k >= max(LENGTHS)
        check(cache_seqlens, torch.int32, len(LENGTHS))
        self._check_starts(cu_seqlens_q)
        return self.metadata

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        causal: bool = False,
        block_table: Tensor | None = None,
        out: Tensor | None = None,
        scheduler_metadata: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        num_splits: int = 0,
        fa_version: int = 2,
    ) -> Tensor:
        assert (fa_version, cu_seqlens_k, max_seqlen_k, max_seqlen_q) == (3, None, self.most, 1)
        assert seqused_k is not None
        assert block_table is not None
        assert out is not None
        check(out, torch.bfloat16, *q.shape)
        self._check(q, k, v, cu_seqlens_q, causal, scheduler_metadata, (q_descale, k_descale, v_descale))
        return out.copy_(self._attend(q, k, v, block_table, seqused_k))

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        causal: bool = False,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
    ) -> Tensor:
        assert (k, v, max_seqlen_q) == (None, None, 1)
        assert cache_seqlens is not None
        assert page_table is not None
        assert self.most == page_table.shape[1] * k_cache.shape[1], "it derives the same from these"
        self._check(q, k_cache, v_cache, cu_seqlens_q, causal, scheduler_metadata, (q_descale, k_descale, v_descale))
        return self._attend(q, k_cache, v_cache, page_table, cache_seqlens)

    def _check_starts(self, starts: Tensor | None) -> None:
        assert starts is not None
        check(starts, torch.int32, len(LENGTHS) + 1)
        assert starts.tolist() == list(range(len(LENGTHS) + 1))

    def _check(self, q: Tensor, k: Tensor, v: Tensor, starts: Any, causal: bool, metadata: Any, scales: Any) -> None:
        self._check_starts(starts)
        assert causal
        assert metadata is self.metadata
        check(q, self.dtype, len(LENGTHS), HEADS, HEAD_DIM)
        for x, scale in zip((q, k, v), scales, strict=True):
            assert x.dtype == self.dtype
            if self.dtype == torch.bfloat16:
                assert scale is None
            else:
                check(scale, torch.float32, len(LENGTHS), KV_HEADS)
                assert (scale == 1).all()
        for x in (k, v):
            check(x, self.dtype, len(x), PAGE, KV_HEADS, HEAD_DIM)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        check(tables, torch.int32, len(LENGTHS), tables.shape[1])
        check(lengths, torch.int32, len(LENGTHS))
        rows = [row[: -(-int(n) // PAGE)] for row, n in zip(tables, lengths, strict=True)]
        return all_requests(q, k, v, rows, lengths.tolist())


@dataclass
class PagedMask:
    """xformers.ops.fmha.attn_bias.PagedBlockDiagonalPaddedKeysMask."""

    lengths: list[int]
    tables: Tensor

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: list[int],
        kv_seqlen: list[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: torch.device | None = None,
    ) -> "PagedMask":
        assert q_seqlen == [1] * len(LENGTHS)
        assert all(isinstance(n, int) for n in kv_seqlen)
        assert (page_size, device) == (PAGE, block_tables.device)
        return cls(kv_seqlen, block_tables)


def memory_efficient_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: PagedMask, p: float = 0.0, scale: float | None = None
) -> Tensor:
    """xformers.ops.fmha's: `[1, tokens, groups, heads of a group, head_dim]`, keys' heads with a stride of 0."""
    group = HEADS // KV_HEADS
    check(query, torch.bfloat16, 1, len(LENGTHS), KV_HEADS, group, HEAD_DIM)
    for x in (key, value):
        check(x, torch.bfloat16, 1, x.shape[1], KV_HEADS, group, HEAD_DIM)
        assert x.stride(3) == 0
    k, v = (x[0, :, :, 0].unflatten(0, (-1, PAGE)) for x in (key, value))
    rows = [row[: -(-n // PAGE)] for row, n in zip(attn_bias.tables, attn_bias.lengths, strict=True)]
    return all_requests(query[0].flatten(1, 2), k, v, rows, attn_bias.lengths).view(query.shape)


def stub(name: str) -> Any:
    """A module that does for a peer's."""
    if name == "FlashInfer":
        return SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    if name == "xformers":
        mask = SimpleNamespace(PagedBlockDiagonalPaddedKeysMask=PagedMask)
        return SimpleNamespace(attn_bias=mask, memory_efficient_attention_forward=memory_efficient_attention_forward)
    return FlashAttention3()


def make_case(kv_format: str) -> tuple[Case, Tensor, Tensor]:
    """A case with its pages; whatever no request has is NaN."""
    torch.manual_seed(3)
    used = [-(-n // PAGE) for n in LENGTHS]
    order, width = torch.randperm(sum(used)).int(), max(used)
    tables = torch.full((len(LENGTHS), width), sum(used), dtype=torch.int32)
    pages = [torch.full((sum(used) + 1, PAGE, KV_HEADS, HEAD_DIM), torch.nan, dtype=torch.bfloat16) for _ in "kv"]
    for request, (length, mine) in enumerate(zip(LENGTHS, order.split(used), strict=True)):
        tables[request, : len(mine)] = mine
        for x in pages:
            data = x[mine.long()].flatten(0, 1)
            data[:length] = torch.randn(length, KV_HEADS, HEAD_DIM).bfloat16()
            x[mine.long()] = data.unflatten(0, (-1, PAGE))
    query = torch.randn(len(LENGTHS), HEADS, HEAD_DIM).bfloat16()
    k, v = (x.to(DTYPES[kv_format]) for x in pages)
    return Case(query, tables, torch.tensor(LENGTHS, dtype=torch.int32), KV_HEADS, PAGE, kv_format), k, v


@pytest.mark.parametrize(("name", "kv_format"), KERNELS)
def test_a_peer_is_called_as_it_is_documented(name: str, kv_format: str) -> None:
    case, k, v = make_case(kv_format)
    attend = NAMES[name].prepare(stub(name), case)
    rounded_query = "FA3" in name and kv_format == "e4m3"
    for _ in range(2):  # it is planned once for all layers
        found = attend(k, v)
        for request in range(len(LENGTHS)):
            expected = reference(case, k, v, request)
            assert (found[request] - expected).abs().max() < (0.3 if rounded_query else 0.02) * expected.abs().max()
    assert error_of(case, attend, k, v) < bench_kernels.ERRORS[kv_format]
    assert error_of(case, lambda k, v: attend(v, k), k, v) > bench_kernels.ERRORS[kv_format]


def test_peers_that_are_missing_or_fail_are_told_of_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def time_calls(calls: list[Callable[[], object]]) -> dict[str, float]:
        for call in calls:
            call()
        return {"us": 10.0}

    def broken(module: ModuleType, case: Case) -> Any:
        raise RuntimeError("no kernel image\nis available")

    def wrong(module: ModuleType, case: Case) -> Any:
        return lambda k, v: torch.randn_like(case.query)

    def right(module: ModuleType, case: Case) -> Any:
        requests = range(len(case.query))
        return lambda k, v: torch.stack([reference(case, k, v, r) for r in requests]).bfloat16()

    peers = [
        Peer("Missing", "missing", "not_there_at_all", ("bf16",), right),
        Peer("Broken", "broken", "json", ("bf16",), broken),
        Peer("Wrong", "wrong", "json", ("bf16",), wrong),
        Peer("Right one", "pytest", "json", ("bf16", "e4m3"), right),
    ]
    monkeypatch.setattr(bench_kernels, "PEERS", peers)
    monkeypatch.setattr(bench_kernels, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench_kernels, "L2_TIMES_FIVE", 1 << 16)
    monkeypatch.setattr(bench_kernels, "time_calls", time_calls)
    rows: list[dict[str, Any]] = []
    bench_kernels.run_peers([], [], [("3b", 2, 40)], rows.append)
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].partition(",")[0] for line in told] == ["Missing", "Broken", "Wrong"]
    assert told[1].endswith("RuntimeError: no kernel image")
    title = f"decode, Right one {pytest.__version__}"
    assert [(row["op"], row["k"]) for row in rows] == [(title, "bf16"), (title, "e4m3")]
    sizes = [2 * 2 * 40 * 2 * 128 * size for size in (2, 1)]
    assert [row["TB/s"] for row in rows] == [size / 10 / 1e6 for size in sizes]
    bench_kernels.run_peers(["right-one"], ["e4m3", "int8"], [("3b", 1, 16)], rows.append)
    assert [row["k"] for row in rows[2:]] == ["e4m3"]
    assert not capsys.readouterr().out


def test_what_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    options = bench_kernels.parse(
        ["--only", "o", "--shape", "gqa8,128,8192", "--peers", "flashinfer,vllm-fa3", "--formats", "bf16"]
    )
    assert options.formats == ["bf16"]
    assert (options.shape, options.peers) == (("gqa8", 128, 8192), ["flashinfer", "vllm-fa3"])
    assert bench_kernels.parse([]).peers == bench_kernels.parse([]).formats == []
    for wrong, named in (
        (["--peers", "fa4"], "fa4"),
        (["--shape", "9b,1,1"], "9b"),
        (["--shape", "3b,1"], "wanted MODEL"),
        (["--shape", "3b,x,1"], "3b,x,1: wanted"),
    ):
        with pytest.raises(SystemExit):
            bench_kernels.parse(wrong)
        assert named in capsys.readouterr().err
