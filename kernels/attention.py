"""Paged attention over block images, without a dense copy of the pool.

A plan, made once per step and shared by all layers, turns block tables into row indices (one for each way in which
layers store KV). A slot that holds no token
of the request is never read: its index points at a position that is, and a bias of minus infinity drops it. So what
unused slots hold, NaN included, can't matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.kv_format import KVShape
from kernels.kv_ops import LayerKV, PagedKV

_SDPA_BATCH = 2  # above it, torch's CPU flash kernel loses to plain products, as it does for every chunk
_QUERY_TILE = 128  # queries of a chunk that are scored at once: keys beyond the last of them are left out


@dataclass(frozen=True)
class DecodePlan:
    """One query per request: B requests, T keys each at most."""

    index: list[Tensor]  # PagedKV.read_index
    bias: Tensor | None  # [B, 1, 1, T], 0 or -inf; None if all lengths are T
    empty: Tensor | None  # bool [B, 1, 1, 1]: requests without a key
    batch: int


@dataclass(frozen=True)
class Tile:
    """Queries [first, last) of a chunk against keys [low, high) of its index."""

    first: int
    last: int
    low: int
    high: int
    bias: Tensor  # [1, 1, last - first, high - low]


@dataclass(frozen=True)
class ChunkPlan:
    """Consecutive queries of one request."""

    index: list[Tensor]  # PagedKV.read_index, of a batch of one
    keys: int  # T
    tiles: list[Tile]


@dataclass(frozen=True)
class AttentionPlan:
    """What a step attends to: decode rows first, then chunks, in the order of the queries."""

    shape: KVShape
    decode: DecodePlan | None
    chunks: list[ChunkPlan]


def plan_decode(kv: PagedKV, tables: Tensor, lengths: Tensor, window: int, dtype: torch.dtype) -> DecodePlan:
    """Plan queries at positions lengths - 1.

    tables int64 `[B, max_blocks]` (padded with anything), lengths int64 `[B]`, both on the CPU or both on the device;
    window in tokens, 0 for none; dtype is that of the queries.
    """
    seen = lengths.clamp(max=window) if window else lengths
    most = max(int(seen.max()), 1)
    offsets = torch.arange(most, device=tables.device)
    valid = offsets < seen[:, None]  # [B, T]
    positions = torch.where(valid, (lengths - seen)[:, None] + offsets, (lengths - seen)[:, None])
    all_valid = bool(valid.all())
    bias = None
    if not all_valid:
        bias = torch.zeros(valid.shape, dtype=dtype, device=tables.device).masked_fill_(~valid, float("-inf"))
        bias = bias[:, None, None]
    empty = (lengths == 0)[:, None, None, None] if not all_valid and bool((lengths == 0).any()) else None
    return DecodePlan(_index(kv, tables, positions), bias, empty, len(lengths))


def plan_chunk(kv: PagedKV, table: Tensor, start: int, count: int, window: int, dtype: torch.dtype) -> ChunkPlan:
    """Plan queries at positions [start, start + count) of the request with block table int64 `[blocks]`."""
    end = start + count
    origin = max(0, start - window + 1) if window else 0  # the oldest key that any query sees
    keys = torch.arange(origin, end, device=table.device)
    tiles = []
    for first in range(0, count, _QUERY_TILE):
        last = min(first + _QUERY_TILE, count)
        low = max(0, start + first - window + 1) - origin if window else 0
        high = start + last - origin
        queries = torch.arange(start + first, start + last, device=table.device)[:, None]
        seen = keys[low:high] <= queries
        if window:
            seen &= keys[low:high] > queries - window
        bias = torch.zeros(seen.shape, dtype=dtype, device=table.device).masked_fill_(~seen, float("-inf"))
        tiles.append(Tile(first, last, low, high, bias[None, None]))
    return ChunkPlan(_index(kv, table[None], keys[None]), end - origin, tiles)


def attention(query: Tensor, layer: LayerKV, plan: AttentionPlan, scale: float) -> Tensor:
    """Attend with query `[n, heads, head_dim]` over the KV of a layer, as it is stored; returns the same shape."""
    done = plan.decode.batch if plan.decode else 0
    parts = [_decode(query[:done], layer, plan.decode, plan.shape, scale)] if plan.decode else []
    for chunk in plan.chunks:
        count = chunk.tiles[-1].last
        parts.append(_chunk(query[done : done + count], layer, chunk, plan.shape, scale))
        done += count
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(query: Tensor, layer: LayerKV, plan: DecodePlan, shape: KVShape, scale: float) -> Tensor:
    heads = shape.num_kv_heads
    key, value = (x.view(plan.batch, heads, -1, shape.head_dim) for x in layer.read(plan.index, query.dtype))
    # The queries that share a KV head stand where attention has its sequence.
    grouped = query.reshape(plan.batch, heads, -1, shape.head_dim)
    if plan.batch <= _SDPA_BATCH:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=plan.bias, scale=scale)
    else:
        scores = torch.matmul(grouped * scale, key.transpose(-1, -2))
        out = torch.matmul((scores if plan.bias is None else scores.add_(plan.bias)).softmax(-1), value)
    if plan.empty is not None:
        out = out.masked_fill(plan.empty, 0)
    return out.reshape(query.shape)


def _chunk(query: Tensor, layer: LayerKV, plan: ChunkPlan, shape: KVShape, scale: float) -> Tensor:
    heads, width = shape.num_kv_heads, shape.head_dim
    key, value = (x.view(heads, -1, width) for x in layer.read(plan.index, query.dtype))
    grouped = (query * scale).view(len(query), heads, -1, width).permute(1, 2, 0, 3)  # [kv_heads, group, n, head_dim]
    out = torch.empty_like(query)
    target = out.view(len(query), heads, -1, width).permute(1, 2, 0, 3)
    for tile in plan.tiles:
        part = grouped[:, :, tile.first : tile.last].reshape(heads, -1, width)
        scores = torch.bmm(part, key[:, tile.low : tile.high].transpose(1, 2))
        scores.view(heads, -1, *tile.bias.shape[-2:]).add_(tile.bias)
        mixed = torch.bmm(scores.softmax(-1), value[:, tile.low : tile.high])
        target[:, :, tile.first : tile.last] = mixed.view(heads, -1, tile.last - tile.first, width)
    return out


def _index(kv: PagedKV, tables: Tensor, positions: Tensor) -> list[Tensor]:
    size = kv.shape.block_size
    return kv.read_index(tables.gather(1, positions // size), positions % size)


def pad_tables(tables: Sequence[Sequence[int]]) -> Tensor:
    """Block tables as int64 `[B, longest]`, padded with block 0."""
    longest = max(1, max(map(len, tables)))
    return torch.tensor([[*table, *[0] * (longest - len(table))] for table in tables], dtype=torch.int64)
