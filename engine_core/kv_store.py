"""The device pool: an array of block images."""

import torch

from kernels.kv_format import BlockLayout
from kernels.kv_ops import PagedKV


class KVStore:
    """Owns the pool, `uint8[num_blocks, image_bytes]`; its pages are touched only when a block is first written."""

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device) -> None:
        self.layout, self.num_blocks = layout, num_blocks
        self.pool = torch.empty((num_blocks, layout.image_bytes), dtype=torch.uint8, device=device)
        self.kv = PagedKV(self.pool, layout)
