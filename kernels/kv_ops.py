"""Typed views of a pool, through which KV is written and read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv_format import BlockLayout, KVCodec, LayerLayout

_PIECE = 8192  # rows that are scaled at once: their float32 stays in the CPU's cache, which takes half the time


@dataclass(frozen=True)
class RowMap:
    """Where the rows of some heads are, counted in rows (or scales) from a layer's first row in block 0."""

    per_block: int
    heads: tuple[int, ...]  # the first row of each


@dataclass(frozen=True)
class Part:
    """What a layer stores in one codec: K, V, or both, which saves a gather. `maps` are indices of `PagedKV.maps`."""

    codec: KVCodec
    first_head: int  # of K's heads, then V's
    num_heads: int
    data: Tensor  # [rows, head_dim] of codec.dtype
    data_map: int
    scales: Tensor | None  # float16 [rows, 1]
    scale_map: int


class LayerKV:
    """K and V of one layer."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def write(self, index: Sequence[Tensor], values: Tensor) -> None:
        """Store K heads, then V heads, `[n, 2 * num_kv_heads, head_dim]`, at an index from `write_index`."""
        for part in self._parts:
            heads = values[:, part.first_head : part.first_head + part.num_heads]
            data, scales = part.codec.encode(heads.reshape(-1, heads.shape[-1]))
            part.data.index_copy_(0, index[part.data_map], data)
            if part.scales is not None and scales is not None:
                part.scales.index_copy_(0, index[part.scale_map], scales)

    def read(self, index: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V at an index from `read_index`, in the order `[B, num_kv_heads, T]`: `[-1, head_dim]` each."""
        found = []
        for part in self._parts:
            data = part.data.index_select(0, index[part.data_map])
            scales = None if part.scales is None else part.scales.index_select(0, index[part.scale_map])
            found.append(_decode(part.codec, data, scales, dtype))
        key, value = found if len(found) == 2 else found[0].view(2, -1, found[0].shape[-1]).unbind()
        return key, value


def _decode(codec: KVCodec, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scales is None or len(data) <= _PIECE:
        return codec.decode(data, scales, dtype)
    found = torch.empty(data.shape, dtype=dtype, device=data.device)
    for start in range(0, len(data), _PIECE):
        piece = slice(start, start + _PIECE)
        found[piece] = codec.decode(data[piece], scales[piece], dtype)
    return found


class PagedKV:
    """The layers of a pool, and the row indices that they share."""

    def __init__(self, pool: Tensor, layout: BlockLayout) -> None:
        """`pool` is uint8 `[num_blocks, layout.image_bytes]`."""
        self.shape = layout.shape
        self.maps: list[RowMap] = []
        self._image_bytes = layout.image_bytes
        self.layers = [LayerKV(self._parts(pool, layer)) for layer in layout.layers]
        self._heads = [torch.tensor(found.heads, device=pool.device) for found in self.maps]

    def write_index(self, blocks: Tensor, slots: Tensor) -> list[Tensor]:
        """For writing n tokens at (blocks, slots), int64 `[n]` each: int64 `[n * heads]` for each map."""
        return [
            ((blocks * found.per_block + slots)[:, None] + heads).flatten()
            for found, heads in zip(self.maps, self._heads, strict=True)
        ]

    def read_index(self, blocks: Tensor, slots: Tensor) -> list[Tensor]:
        """For reading tokens at (blocks, slots), int64 `[B, T]` each; flat, for each map."""
        return [
            ((blocks * found.per_block + slots)[:, None] + heads.view(-1, 1, self.shape.num_kv_heads, 1)).flatten()
            for found, heads in zip(self.maps, self._heads, strict=True)
        ]

    def _parts(self, pool: Tensor, layer: LayerLayout) -> list[Part]:
        k, k_scales, v, v_scales = layer.k_offset, layer.k_scale_offset, layer.v_offset, layer.v_scale_offset
        if layer.k == layer.v:
            return [self._part(pool, layer.k, 0, [k, v], [k_scales, v_scales])]
        heads = self.shape.num_kv_heads
        return [self._part(pool, layer.k, 0, [k], [k_scales]), self._part(pool, layer.v, heads, [v], [v_scales])]

    def _part(
        self, pool: Tensor, codec: KVCodec, first_head: int, offsets: list[int], scale_offsets: list[int]
    ) -> Part:
        data, data_map = self._rows(pool, codec.dtype, self.shape.head_dim, offsets)
        scales, scale_map = self._rows(pool, torch.float16, 1, scale_offsets) if codec.has_scale else (None, -1)
        return Part(codec, first_head, len(offsets) * self.shape.num_kv_heads, data, data_map, scales, scale_map)

    def _rows(self, pool: Tensor, dtype: torch.dtype, width: int, offsets: list[int]) -> tuple[Tensor, int]:
        """The pool as rows from the first offset on, and the number of the map that finds a token's rows there."""
        unit, shape = width * dtype.itemsize, self.shape
        firsts = [(offset - offsets[0]) // unit for offset in offsets]
        heads = tuple(first + head * shape.block_size for first in firsts for head in range(shape.num_kv_heads))
        row_map = RowMap(self._image_bytes // unit, heads)
        if row_map not in self.maps:
            self.maps.append(row_map)
        return pool.view(dtype).view(-1, width)[offsets[0] // unit :], self.maps.index(row_map)
