"""A StepPlan as tensors."""

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from engine_core.plan import Row, StepPlan
from kernels.attention import AttentionPlan, DecodePlan, pad_tables, plan_chunk, plan_decode
from kernels.kv_ops import PagedKV


@dataclass(frozen=True)
class Batch:
    """The tokens of one step, n in all: those of decode rows first, then those of prefill chunks."""

    tokens: Tensor  # int64 [n]
    positions: Tensor  # int64 [n]
    write_index: list[Tensor]  # PagedKV.write_index
    attention: dict[int, AttentionPlan]  # by window
    ends: list[int]  # by row of the plan: the index after its last token


def build_batch(plan: StepPlan, kv: PagedKV, windows: frozenset[int], dtype: torch.dtype) -> Batch:
    """Read the plan's rows, block tables included. `windows` are the layers' windows, dtype is the compute dtype."""
    rows = [*plan.decodes, *plan.prefills]
    tables = pad_tables([row.blocks for row in rows])
    counts = torch.tensor([len(row.tokens) for row in rows])
    starts = torch.tensor([row.start for row in rows])
    ends = counts.cumsum(0)
    row_of = torch.repeat_interleave(torch.arange(len(rows)), counts)
    positions = torch.arange(int(ends[-1])) + (starts - ends + counts)[row_of]
    blocks = tables[row_of, positions // kv.shape.block_size]
    return Batch(
        tokens=torch.tensor(list(chain.from_iterable(row.tokens for row in rows))),
        positions=positions,
        write_index=kv.write_index(blocks, positions % kv.shape.block_size),
        attention={window: _attention(plan, tables, starts, kv, window, dtype) for window in windows},
        ends=ends.tolist(),
    )


def _attention(
    plan: StepPlan, tables: Tensor, starts: Tensor, kv: PagedKV, window: int, dtype: torch.dtype
) -> AttentionPlan:
    decode: DecodePlan | None = None
    count = len(plan.decodes)
    if count:
        longest = max(len(row.blocks) for row in plan.decodes)
        decode = plan_decode(kv, tables[:count, :longest], starts[:count] + 1, window, dtype)
    chunks = [
        plan_chunk(kv, table, row.start, len(row.tokens), window, dtype)
        for row, table in zip(plan.prefills, tables[count:], strict=True)
    ]
    return AttentionPlan(kv.shape, decode, chunks)


def wants_prompt_logprobs(row: Row) -> bool:
    """Whether a prefill row needs logits for all of its tokens."""
    return row.sampling.prompt_logprobs >= 0
