"""The device pool, an array of block images; and which layers keep K in 16 bits there whatever the format."""

import statistics

import torch

from engine_core.model.weights import Weights
from kernels.kv_format import BlockLayout
from kernels.kv_ops import PagedKV


class KVStore:
    """Owns the pool, `uint8[num_blocks, image_bytes]`; its pages are touched only when a block is first written."""

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device) -> None:
        self.layout, self.num_blocks = layout, num_blocks
        self.pool = torch.empty((num_blocks, layout.image_bytes), dtype=torch.uint8, device=device)
        self.kv = PagedKV(self.pool, layout)


OUTLIER = 10  # times the median norm


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Layers of a list such as `0,27`; `none` is none. Raises ValueError."""
    if text == "none":
        return ()
    try:
        layers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        layers = [-1]
    if not all(0 <= layer < num_layers for layer in layers):
        raise ValueError(f"{text!r} is not auto, none or a list of layers from 0 to {num_layers - 1} such as 0,27")
    return tuple(layers)


def outlier_layers(weights: Weights, num_layers: int, num_kv_heads: int) -> tuple[int, ...]:
    """Layers in which a KV head's key bias has a norm above 10 times the median of layers: 8 bits would ruin their K.

    In Qwen2.5-7B they are the first and the last: norms of 605 and 921, with a median of 22
    (https://github.com/ggml-org/llama.cpp/pull/21385). Empty for models without key biases.
    """
    names = [f"layers.{layer}.k.bias" for layer in range(num_layers)]
    if not all(name in weights.shapes for name in names):
        return ()
    norms = [weights.dense(name).float().view(num_kv_heads, -1).norm(dim=1).max().item() for name in names]
    limit = OUTLIER * statistics.median(norms)
    return tuple(layer for layer, norm in enumerate(norms) if norm > limit)
