"""Plain versions of the paged ops, row by row in float32: what the fast ones are tested against."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv_format import KVFormat, KVShape


def paged_attention(
    query: Tensor,
    rows: Tensor,
    shape: KVShape,
    kv_format: KVFormat,
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
    group = query.shape[1] // shape.num_kv_heads
    for i in range(len(query)):
        end = start + i + 1
        for head in range(query.shape[1]):
            seen = range(max(0, end - window) if window else 0, end)
            base = [
                table[p // shape.block_size] * shape.rows_per_block
                + head // group * shape.block_size
                + p % shape.block_size
                for p in seen
            ]
            if not base:
                continue
            index = torch.tensor(base, device=query.device)
            key = kv_format.read(rows, index).float()
            value = kv_format.read(rows, index + shape.num_kv_heads * shape.block_size).float()
            out[i, head] = (key @ query[i, head].float() * scale).softmax(0) @ value
    return out.to(query.dtype)
