"""Paged KV with known contents, and float64 attention over it: what the kernels are checked against."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cuda_layout import KVLayout, plain_layout

FP8 = {
    "e4m3": (torch.float8_e4m3fn, 448.0),
    "e4m3_scaled": (torch.float8_e4m3fn, 448.0),
    "e5m2": (torch.float8_e5m2, 57344.0),
}
SIXTEEN_BIT = {"fp16": torch.float16, "bf16": torch.bfloat16}


def encode(x: Tensor, kv_format: str) -> tuple[Tensor, Tensor | None]:
    """Rows `[..., head_dim]` as stored: bytes uint8 `[..., head_dim * size]`, and float16 scales `[..., 1]` if any."""
    if kv_format in SIXTEEN_BIT:
        return x.to(SIXTEEN_BIT[kv_format]).contiguous().view(torch.uint8), None
    x = x.float()
    if kv_format in ("int8", "e4m3_scaled"):
        top = 127.0 if kv_format == "int8" else FP8[kv_format][1]
        scale = (x.abs().amax(-1, keepdim=True) / top).half()
        x = torch.where(scale == 0, 0.0, x / scale.float())
        if kv_format == "int8":
            return x.round().clamp(-127, 127).to(torch.int8).view(torch.uint8), scale
    else:
        scale = None
    dtype, top = FP8[kv_format]
    return x.clamp(-top, top).to(dtype).view(torch.uint8), scale


def decode(data: Tensor, scales: Tensor | None, kv_format: str) -> Tensor:
    """What was stored, as float64 `[..., head_dim]`."""
    if kv_format in SIXTEEN_BIT:
        return data.contiguous().view(SIXTEEN_BIT[kv_format]).double()
    dtype = torch.int8 if kv_format == "int8" else FP8[kv_format][0]
    values = data.contiguous().view(dtype).to(torch.float32).double()
    return values if scales is None else values * scales.double()


def rows_of(pool: Tensor, layout: KVLayout, part: str) -> tuple[Tensor, Tensor | None]:
    """Views of a layer's K ("k") or V ("v"): bytes `[blocks, kv_heads, slots, row bytes]`, scales `[..., 1]`."""
    kv_format = layout.k_format if part == "k" else layout.v_format
    offset = layout.k_offset if part == "k" else layout.v_offset
    width = layout.head_dim * (2 if kv_format in SIXTEEN_BIT else 1)
    heads, slots = layout.num_kv_heads, layout.block_size
    data = pool[:, offset : offset + heads * slots * width].unflatten(1, (heads, slots, width))
    if kv_format not in ("int8", "e4m3_scaled"):
        return data, None
    offset = layout.k_scale_offset if part == "k" else layout.v_scale_offset
    return data, pool[:, offset : offset + heads * slots * 2].unflatten(1, (heads, slots, 2))


@dataclass(frozen=True)
class Case:
    """A batch: request i has counts[i] queries, the last of its lengths[i] tokens."""

    layout: KVLayout
    pool: Tensor
    tables: Tensor
    lengths: Tensor
    query_start: Tensor
    query: Tensor
    most_queries: int
    window: int = 0


def make_case(
    k_format: str,
    v_format: str,
    lengths: Sequence[int],
    *,
    dtype: torch.dtype,
    counts: Sequence[int] | None = None,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 16,
    window: int = 0,
    first_block: int = 0,
    shared: bool = False,
    layers: int = 2,
    layer: int = 1,
    seed: int = 0,
    device: str = "cuda",
) -> Case:
    """Random KV in shuffled blocks of a pool that is otherwise 0xff, which is NaN in every float format.

    `shared`: the second request's table begins with the first's blocks, as far as both are full.
    """
    random = torch.Generator(device).manual_seed(seed)
    counts = counts or [min(1, n) for n in lengths]
    layout = plain_layout(k_format, v_format, layers, kv_heads, head_dim, block_size, layer)
    blocks = [-(-n // block_size) for n in lengths]
    order = torch.randperm(sum(blocks) + 3, generator=random, device=device).int() + first_block
    pool = torch.full((first_block + len(order), layout.block_stride), 0xFF, dtype=torch.uint8, device=device)
    tables = torch.full((len(lengths), max(1, *blocks)), 2**30, dtype=torch.int32, device=device)
    for i, (start, count) in enumerate(zip(itertools.accumulate(blocks, initial=0), blocks, strict=False)):
        tables[i, :count] = order[start : start + count]
    if shared:
        full = min(lengths[0], lengths[1]) // block_size
        tables[1, :full] = tables[0, :full]
    for i, length in enumerate(lengths):
        at = torch.arange(length, device=device)
        index = tables[i, at // block_size].long(), slice(None), at % block_size
        for part, kv_format, mean in (("k", k_format, 0.0), ("v", v_format, 0.25)):
            x = torch.randn((length, kv_heads, head_dim), generator=random, device=device) + mean
            x[..., :2] *= 4
            data, scales = encode(x, kv_format)
            data_rows, scale_rows = rows_of(pool, layout, part)
            data_rows[index] = data
            if scale_rows is not None and scales is not None:
                scale_rows[index] = scales.view(torch.uint8)
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    query = torch.randn((sum(counts), heads, head_dim), generator=random, device=device).to(dtype)
    return Case(
        layout,
        pool,
        tables,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        starts,
        query,
        max(counts),
        window,
    )


def reference(case: Case) -> Tensor:
    """Attention in float64 over what is stored, `[tokens, heads, head_dim]`."""
    out = torch.zeros(case.query.shape, dtype=torch.float64, device=case.query.device)
    size = case.layout.block_size
    for i, length in enumerate(case.lengths.tolist()):
        first, last = case.query_start[i : i + 2].tolist()
        if length == 0 or first == last:
            continue
        at = torch.arange(length, device=out.device)
        index = case.tables[i, at // size].long(), slice(None), at % size
        k, v = (
            decode(data[index], None if scales is None else scales[index].contiguous().view(torch.float16), kv_format)
            for kv_format, (data, scales) in (
                (case.layout.k_format, rows_of(case.pool, case.layout, "k")),
                (case.layout.v_format, rows_of(case.pool, case.layout, "v")),
            )
        )
        q = case.query[first:last].double().unflatten(1, (case.layout.num_kv_heads, -1))  # [t, kv_heads, group, d]
        scores = torch.einsum("thgd,shd->thgs", q, k) * case.layout.head_dim**-0.5
        limit = length - (last - first) + torch.arange(last - first, device=out.device)[:, None] + 1
        seen = at < limit
        if case.window:
            seen &= at >= limit - case.window
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("thgs,shd->thgd", weights, v).flatten(1, 2)
    return out


def compare(out: Tensor, wanted: Tensor) -> dict[str, float]:
    """Cosine, largest absolute difference, relative error in the 2-norm."""
    out = out.double()
    cosine = torch.nn.functional.cosine_similarity(out.flatten(), wanted.flatten(), dim=0).item()
    return {
        "cosine": cosine,
        "max_abs_error": (out - wanted).abs().max().item(),
        "relative_error": ((out - wanted).norm() / wanted.norm()).item(),
    }
