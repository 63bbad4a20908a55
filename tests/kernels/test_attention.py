"""Paged attention and KV writes against the plain version, with NaN in every slot that holds no token."""

import random

import pytest
import torch

from kernels import reference
from kernels.attention import AttentionPlan, attention, pad_tables, plan_chunk, plan_decode
from kernels.kv_format import FloatKV, KVShape, resolve_kv_dtype
from kernels.kv_ops import write_index

HEADS, BLOCKS = 6, 256


def make_pool(shape: KVShape, kv_format: FloatKV) -> torch.Tensor:
    return torch.full((BLOCKS, kv_format.image_bytes(shape)), 0xFF, dtype=torch.uint8)  # NaN


def fill(rows: torch.Tensor, shape: KVShape, kv_format: FloatKV, table: list[int], count: int) -> None:
    """Write `count` tokens of random KV."""
    positions = torch.arange(count)
    blocks = torch.tensor(table)[positions // shape.block_size]
    index = write_index(shape, blocks, positions % shape.block_size)
    kv_format.write(rows, index, torch.randn(len(index), shape.head_dim).to(kv_format.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("lengths", [[5], [17, 1], [3, 16, 33, 0], [9, 9, 9]])
def test_mixed_step(dtype: torch.dtype, window: int, block_size: int, lengths: list[int]) -> None:
    """Decode rows of these lengths (0: no key at all) beside a chunk at 7 and one at 0."""
    torch.manual_seed(0)
    shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, block_size=block_size)
    kv_format = resolve_kv_dtype("auto", dtype)
    rows = kv_format.layer_rows(make_pool(shape, kv_format), shape, 1)
    free = iter(random.Random(0).sample(range(BLOCKS), BLOCKS))
    chunks = [(7, 140), (0, 20)]  # the first has two tiles
    ends = [*lengths, *(start + count for start, count in chunks)]
    tables = [[next(free) for _ in range(-(-end // block_size))] for end in ends]
    for table, end in zip(tables, ends, strict=True):
        if end:
            fill(rows, shape, kv_format, table, end)
    plan = AttentionPlan(
        shape,
        plan_decode(shape, pad_tables(tables[: len(lengths)]), torch.tensor(lengths), window, dtype),
        [
            plan_chunk(shape, torch.tensor(table), start, count, window, dtype)
            for (start, count), table in zip(chunks, tables[len(lengths) :], strict=True)
        ],
    )
    starts = [length - 1 for length in lengths] + [start for start, _ in chunks]
    counts = [1] * len(lengths) + [count for _, count in chunks]
    query = torch.randn(sum(counts), HEADS, 32).to(dtype)
    found = attention(query, rows, plan, kv_format, 0.2)
    expected = torch.cat(
        [
            reference.paged_attention(part, rows, shape, kv_format, table, start, window, 0.2)
            for part, table, start in zip(query.split(counts), tables, starts, strict=True)
        ]
    )
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_write_touches_its_slots_only() -> None:
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4)
    kv_format = resolve_kv_dtype("auto", torch.float32)
    pool = torch.zeros(5, kv_format.image_bytes(shape), dtype=torch.uint8)
    index = write_index(shape, torch.tensor([3]), torch.tensor([2]))
    kv_format.write(kv_format.layer_rows(pool, shape, 1), index, torch.arange(16.0).view(4, 4))
    image = pool.view(torch.float32).view(5, 3, 2, 2, 4, 4)  # [block][layer][K|V][kv_head][slot][head_dim]
    assert torch.equal(image[3, 1, :, :, 2].flatten(), torch.arange(16.0))
    assert image.count_nonzero() == 15
