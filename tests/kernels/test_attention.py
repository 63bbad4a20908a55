"""Paged attention and KV writes in every format against the plain version, with NaN wherever no token is."""

import random

import pytest
import torch

from kernels import kv_ops, reference
from kernels.attention import AttentionPlan, attention, pad_tables, plan_chunk, plan_decode
from kernels.kv_format import BlockLayout, KVShape, block_layout, kv_codecs, resolve_kv_dtype
from kernels.kv_ops import PagedKV

HEADS, BLOCKS = 6, 256
FORMATS = [codec.name for codec in kv_codecs(torch.float32)[1:]]
CASES = [
    *((dtype, "auto", ()) for dtype in (torch.float32, torch.bfloat16)),
    *((torch.float32, name, ()) for name in FORMATS),
    *((torch.bfloat16, name, wide) for name in FORMATS for wide in ((), (1,))),
]


def make_layout(shape: KVShape, name: str, dtype: torch.dtype, wide: tuple[int, ...] = ()) -> BlockLayout:
    return block_layout(shape, resolve_kv_dtype(name, dtype), dtype, wide)


def make_pool(layout: BlockLayout, byte: int = 0xFF) -> torch.Tensor:
    return torch.full((BLOCKS, layout.image_bytes), byte, dtype=torch.uint8)  # NaN, also as a scale


def fill(kv: PagedKV, table: list[int], count: int) -> None:
    """Write `count` tokens of random KV in both layers."""
    shape = kv.shape
    positions = torch.arange(count)
    blocks = torch.tensor(table)[positions // shape.block_size]
    index = kv.write_index(blocks, positions % shape.block_size)
    for layer in kv.layers:
        layer.write(index, torch.randn(count, 2 * shape.num_kv_heads, shape.head_dim))


@pytest.mark.parametrize(("dtype", "name", "wide"), CASES)
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("lengths", [[5], [17, 1], [3, 16, 33, 0], [9, 9, 9]])
def test_mixed_step(
    dtype: torch.dtype, name: str, wide: tuple[int, ...], window: int, block_size: int, lengths: list[int]
) -> None:
    """Decode rows of these lengths (0: no key at all) beside a chunk at 7 and one at 0."""
    torch.manual_seed(0)
    layout = make_layout(KVShape(num_layers=2, num_kv_heads=2, head_dim=32, block_size=block_size), name, dtype, wide)
    pool = make_pool(layout, 0x7F if block_size > 1 else 0xFF)
    kv = PagedKV(pool, layout)
    free = iter(random.Random(0).sample(range(BLOCKS), BLOCKS))
    chunks = [(7, 140), (0, 20)]  # the first has two tiles
    ends = [*lengths, *(start + count for start, count in chunks)]
    tables = [[next(free) for _ in range(-(-end // block_size))] for end in ends]
    for table, end in zip(tables, ends, strict=True):
        if end:
            fill(kv, table, end)
    plan = AttentionPlan(
        layout.shape,
        plan_decode(kv, pad_tables(tables[: len(lengths)]), torch.tensor(lengths), window, dtype),
        [
            plan_chunk(kv, torch.tensor(table), start, count, window, dtype)
            for (start, count), table in zip(chunks, tables[len(lengths) :], strict=True)
        ],
    )
    starts = [length - 1 for length in lengths] + [start for start, _ in chunks]
    counts = [1] * len(lengths) + [count for _, count in chunks]
    query = torch.randn(sum(counts), HEADS, 32).to(dtype)
    found = attention(query, kv.layers[1], plan, 0.2)
    expected = torch.cat(
        [
            reference.paged_attention(part, pool, layout, 1, table, start, window, 0.2)
            for part, table, start in zip(query.split(counts), tables, starts, strict=True)
        ]
    )
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_write_touches_its_slots_only() -> None:
    layout = make_layout(KVShape(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4), "auto", torch.float32)
    pool = torch.zeros(5, layout.image_bytes, dtype=torch.uint8)
    kv = PagedKV(pool, layout)
    kv.layers[1].write(kv.write_index(torch.tensor([3]), torch.tensor([2])), torch.arange(16.0).view(1, 4, 4))
    image = pool.view(torch.float32).view(5, 3, 2, 2, 4, 4)  # [block][layer][K|V][kv_head][slot][head_dim]
    assert torch.equal(image[3, 1, :, :, 2].flatten(), torch.arange(16.0))
    assert image.count_nonzero() == 15


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_is_where_the_layout_says(name: str) -> None:
    """Byte for byte: data of every layer, then scales; K of layer 1 in 16 bits; nothing else is touched."""
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=32, block_size=4)
    layout = make_layout(shape, name, torch.bfloat16, (1,))
    pool = torch.zeros(5, layout.image_bytes, dtype=torch.uint8)
    kv = PagedKV(pool, layout)
    torch.manual_seed(0)
    values = torch.randn(1, 4, 32)
    codec = resolve_kv_dtype(name, torch.bfloat16)
    for number, layer in enumerate(kv.layers):
        pool.zero_()
        layer.write(kv.write_index(torch.tensor([3]), torch.tensor([2])), values)
        where, written = layout.layers[number], 0
        for head in range(4):
            own = kv_codecs(torch.bfloat16)[0] if number == 1 and head < 2 else codec
            data, scales = own.encode(values[:, head])
            offset, scale_offset = (
                (where.k_offset, where.k_scale_offset) if head < 2 else (where.v_offset, where.v_scale_offset)
            )
            row = head % 2 * 4 + 2
            stored = data.view(torch.uint8).flatten()
            assert torch.equal(pool[3, offset + row * len(stored) :][: len(stored)], stored)
            written += int(stored.count_nonzero())
            if scales is not None:
                stored = scales.view(torch.uint8).flatten()
                assert torch.equal(pool[3, scale_offset + row * 2 :][:2], stored)
                written += int(stored.count_nonzero())
        assert pool.count_nonzero() == written


@pytest.mark.parametrize("name", FORMATS)
def test_reading_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout(KVShape(num_layers=2, num_kv_heads=2, head_dim=32, block_size=4), name, torch.bfloat16)
    kv = PagedKV(make_pool(layout), layout)
    fill(kv, list(range(6)), 22)
    index = kv.read_index(torch.arange(22)[None] // 4, torch.arange(22)[None] % 4)
    whole = kv.layers[1].read(index, torch.bfloat16)
    monkeypatch.setattr(kv_ops, "_PIECE", 7)
    for found, expected in zip(kv.layers[1].read(index, torch.bfloat16), whole, strict=True):
        assert torch.equal(found, expected)
