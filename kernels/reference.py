"""Plain versions of the paged ops, row by row in float32: what the fast ones are tested against."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv_format import BlockLayout


def stored_row(pool: Tensor, layout: BlockLayout, layer: int, part: str, head: int, block: int, slot: int) -> Tensor:
    """K ("k") or V ("v") of one token and KV head, as the pool has it: float32 `[head_dim]`."""
    where = layout.layers[layer]
    codec, offset, scale_offset = (
        (where.k, where.k_offset, where.k_scale_offset)
        if part == "k"
        else (where.v, where.v_offset, where.v_scale_offset)
    )
    row = head * layout.shape.block_size + slot
    size = layout.shape.head_dim * codec.dtype.itemsize
    data = pool[block, offset + row * size : offset + (row + 1) * size].clone().view(codec.dtype)
    scale = pool[block, scale_offset + 2 * row :][:2].clone().view(torch.float16)
    return codec.decode(data[None], scale[None] if codec.has_scale else None, torch.float32)[0]


def paged_attention(
    query: Tensor,
    pool: Tensor,
    layout: BlockLayout,
    layer: int,
    table: Sequence[int],
    start: int,
    window: int,
    scale: float,
) -> Tensor:
    """Queries `[n, heads, head_dim]` at positions [start, start + n) of the request with block `table`.

    Query i sees positions up to start + i, of which the last `window` if that is not 0. A query that sees nothing
    (start + i < 0) gives zeros.
    """
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    shape = layout.shape
    group = query.shape[1] // shape.num_kv_heads
    for head in range(shape.num_kv_heads):
        key, value = (
            torch.stack(
                [torch.zeros(shape.head_dim, device=query.device)]
                + [
                    stored_row(pool, layout, layer, part, head, table[p // shape.block_size], p % shape.block_size)
                    for p in range(start + len(query))
                ]
            )[1:]
            for part in ("k", "v")
        )
        for i in range(len(query)):
            end = start + i + 1
            first = max(0, end - window) if window else 0
            for own in range(head * group, (head + 1) * group) if end > 0 else ():
                weights = (key[first:end] @ query[i, own].float() * scale).softmax(0)
                out[i, own] = weights @ value[first:end]
    return out.to(query.dtype)
