"""Others' paged decode attention, where it can be imported: FlashInfer, vLLM's FlashAttention 3, upstream's, xformers.

All of one case: a token per request, pages of keys and values `[pages, page_size, kv_heads, head_dim]` each (the layout
that FlashInfer calls NHD). Each peer plans once, as an engine does for the layers of a step; planning isn't timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
WORKSPACE = 128 << 20  # bytes, as FlashInfer's documentation has it
Attend = Callable[[Tensor, Tensor], Any]  # key pages, value pages -> `[batch, heads, head_dim]`, bf16


@dataclass(frozen=True)
class Case:
    """A decode step, and the shape of the pages."""

    query: Tensor  # bf16 [batch, heads, head_dim]
    tables: Tensor  # int32 [batch, pages]
    lengths: Tensor  # int32 [batch], tokens of each request, the new one included
    kv_heads: int
    page_size: int
    kv_format: str


@dataclass(frozen=True)
class Peer:
    """A package that may be there."""

    name: str
    distribution: str
    module: str
    formats: tuple[str, ...]
    prepare: Callable[[ModuleType, Case], Attend]

    def load(self) -> ModuleType:
        """Import it. Raises whatever it raises."""
        return import_module(self.module)

    @property
    def title(self) -> str:
        """Name and version."""
        try:
            return f"{self.name} {metadata.version(self.distribution)}"
        except metadata.PackageNotFoundError:
            return self.name


def flashinfer(module: ModuleType, case: Case) -> Attend:
    """FlashInfer's batch decode with tensor cores; fp8 pages with a bf16 query."""
    pages = (case.lengths + case.page_size - 1) // case.page_size
    starts = torch.zeros(len(pages) + 1, dtype=torch.int32, device=pages.device)
    starts[1:] = pages.cumsum(0)
    used = torch.arange(case.tables.shape[1], device=pages.device) < pages[:, None]
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=pages.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    _, heads, head_dim = case.query.shape
    last = (case.lengths - 1) % case.page_size + 1
    dtypes = {"q_data_type": case.query.dtype, "kv_data_type": DTYPES[case.kv_format]}
    sizes = heads, case.kv_heads, head_dim, case.page_size
    wrapper.plan(starts, case.tables[used], last, *sizes, **dtypes)
    out = torch.empty_like(case.query)
    return lambda k, v: wrapper.run(case.query, (k, v), out=out)


def _fa3(module: ModuleType, case: Case) -> tuple[Tensor, dict[str, Any]]:
    """FlashAttention 3's query, and what both interfaces take by one name. For fp8 pages the query is fp8, too."""
    batch, heads, head_dim = case.query.shape
    query = case.query.to(DTYPES[case.kv_format])
    scheduler_metadata = module.get_scheduler_metadata(
        batch_size=batch,
        max_seqlen_q=1,
        max_seqlen_k=case.tables.shape[1] * case.page_size,
        num_heads_q=heads,
        num_heads_kv=case.kv_heads,
        headdim=head_dim,
        cache_seqlens=case.lengths,
        qkv_dtype=query.dtype,
        cu_seqlens_q=_starts(case),
        page_size=case.page_size,
        causal=True,
    )
    ones = torch.ones(batch, case.kv_heads, device=query.device)
    scales = {} if case.kv_format == "bf16" else dict.fromkeys(("q_descale", "k_descale", "v_descale"), ones)
    return query, {"scheduler_metadata": scheduler_metadata, "cu_seqlens_q": _starts(case), "causal": True, **scales}


def _starts(case: Case) -> Tensor:
    return torch.arange(len(case.query) + 1, dtype=torch.int32, device=case.query.device)


def vllm_fa3(module: ModuleType, case: Case) -> Attend:
    """The FlashAttention 3 that comes with vLLM."""
    query, options = _fa3(module, case)
    out = torch.empty_like(case.query)
    most = case.tables.shape[1] * case.page_size
    options |= {"max_seqlen_q": 1, "max_seqlen_k": most, "seqused_k": case.lengths, "block_table": case.tables}
    return lambda k, v: module.flash_attn_varlen_func(query, k, v, out=out, fa_version=3, **options)


def fa3(module: ModuleType, case: Case) -> Attend:
    """Upstream's FlashAttention 3."""
    query, options = _fa3(module, case)
    options |= {"max_seqlen_q": 1, "cache_seqlens": case.lengths, "page_table": case.tables}
    return lambda k, v: module.flash_attn_with_kvcache(query, k, v, **options)


def xformers(module: ModuleType, case: Case) -> Attend:
    """xformers' memory-efficient attention; which kernel, it chooses."""
    batch, heads, head_dim = case.query.shape
    bias = module.attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[1] * batch,
        kv_seqlen=case.lengths.tolist(),
        block_tables=case.tables,
        page_size=case.page_size,
        device=case.tables.device,
    )
    shape = case.kv_heads, heads // case.kv_heads, head_dim
    query = case.query.view(1, batch, *shape)

    def attend(k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.view(1, -1, case.kv_heads, 1, head_dim).expand(-1, -1, *shape) for x in (k, v))
        out: Tensor = module.memory_efficient_attention_forward(query, k, v, attn_bias=bias)
        return out.view(batch, heads, head_dim)

    return attend


PEERS = (
    Peer("FlashInfer", "flashinfer-python", "flashinfer", ("bf16", "e4m3", "e5m2"), flashinfer),
    Peer("vLLM FA3", "vllm", "vllm.vllm_flash_attn", ("bf16", "e4m3"), vllm_fa3),
    Peer("FA3", "flash-attn-3", "flash_attn_interface", ("bf16", "e4m3"), fa3),
    Peer("xformers", "xformers", "xformers.ops.fmha", ("bf16",), xformers),
)


def reference(case: Case, k: Tensor, v: Tensor, request: int = 0) -> Tensor:
    """What a request's output is, float64 `[heads, head_dim]`."""
    length = int(case.lengths[request])
    pages = case.tables[request, : -(-length // case.page_size)].long()
    keys, values = (x[pages].flatten(0, 1)[:length].double() for x in (k, v))  # [length, kv_heads, head_dim]
    query = case.query[request].double().view(case.kv_heads, -1, case.query.shape[-1])
    scores = torch.einsum("hgd,lhd->hgl", query, keys) / query.shape[-1] ** 0.5
    return torch.einsum("hgl,lhd->hgd", scores.softmax(-1), values).flatten(0, 1)


def error_of(case: Case, attend: Attend, k: Tensor, v: Tensor) -> float:
    """The largest error of the last request's output, as a share of its largest element."""
    out = attend(k, v)
    assert out.dtype == torch.bfloat16
    request = len(case.query) - 1
    expected = reference(case, k, v, request)
    return float((out.view(case.query.shape)[request].double() - expected).abs().max() / expected.abs().max())
