"""Writing KV into the pool."""

import torch
from torch import Tensor

from kernels.kv_format import KVShape


def write_index(shape: KVShape, blocks: Tensor, slots: Tensor) -> Tensor:
    """Rows, int64 `[n * 2 * num_kv_heads]`, that hold K and V of n tokens at (blocks, slots), int64 `[n]` each.

    The order is that of a `[n, 2, num_kv_heads, head_dim]` tensor; add no layer offset: `layer_rows` has it.
    """
    heads = torch.arange(2 * shape.num_kv_heads, device=blocks.device) * shape.block_size
    return ((blocks * shape.rows_per_block + slots)[:, None] + heads).flatten()
