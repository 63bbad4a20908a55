"""How KV is stored in the pool: one small class per format, one resolver, one function for sizes.

A block image is the bytes of one block in one run: `[layer][K|V][kv_head][slot][head_dim]` elements, then the scales
of formats that have them. Pools are `uint8[num_blocks, image_bytes]`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVShape:
    """What decides the size of a block, besides the format."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def rows_per_layer(self) -> int:
        """Rows of head_dim elements that a block holds for one layer, K and V together."""
        return 2 * self.num_kv_heads * self.block_size

    @property
    def rows_per_block(self) -> int:
        """Rows of head_dim elements in a block image."""
        return self.num_layers * self.rows_per_layer


@dataclass(frozen=True)
class FloatKV:
    """Elements in the compute dtype, as they are."""

    name: str
    dtype: torch.dtype

    def image_bytes(self, shape: KVShape) -> int:
        """Bytes of one block image."""
        return shape.rows_per_block * shape.head_dim * self.dtype.itemsize

    def layer_rows(self, pool: Tensor, shape: KVShape, layer: int) -> Tensor:
        """A view of pool `uint8[num_blocks, image_bytes]` as rows `[R, head_dim]` that starts at block 0 of `layer`.

        K (`part` 0) or V (1) of `head` and `slot` in block b is row
        `b * rows_per_block + (part * num_kv_heads + head) * block_size + slot`, the same for every layer.
        """
        return pool.view(self.dtype).view(-1, shape.head_dim)[layer * shape.rows_per_layer :]

    def write(self, rows: Tensor, index: Tensor, values: Tensor) -> None:
        """Store values `[n, head_dim]` of the compute dtype at rows index int64 `[n]`."""
        rows.index_copy_(0, index, values)

    def read(self, rows: Tensor, index: Tensor) -> Tensor:
        """Gather rows index int64 `[n]` as the compute dtype `[n, head_dim]`."""
        return rows.index_select(0, index)


KVFormat = FloatKV  # a union, once there are more

_COMPUTE = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_NAMES = ("auto", "fp16", "bf16")


def resolve_kv_dtype(name: str, compute_dtype: torch.dtype) -> KVFormat:
    """The format of a `--kv-cache-dtype`: `auto`, `fp16` and `bf16` all mean the compute dtype.

    Raises ValueError, listing the valid names, for any other.
    """
    if name not in _NAMES:
        raise ValueError(f"unknown KV cache dtype {name!r}; valid names: {', '.join(_NAMES)}")
    return FloatKV(_COMPUTE[compute_dtype], compute_dtype)
