"""The device pool: an array of block images."""

import torch

from kernels.kv_format import KVFormat, KVShape


class KVStore:
    """Owns the pool, `uint8[num_blocks, image_bytes]`; its pages are touched only when a block is first written."""

    def __init__(self, kv_format: KVFormat, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.format, self.shape, self.num_blocks = kv_format, shape, num_blocks
        self.pool = torch.empty((num_blocks, kv_format.image_bytes(shape)), dtype=torch.uint8, device=device)
        self.layers = [kv_format.layer_rows(self.pool, shape, layer) for layer in range(shape.num_layers)]
