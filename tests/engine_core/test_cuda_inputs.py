"""What the CUDA kernels are told of a step's rows; no GPU is needed to check it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_core.cuda_inputs import StepInputs, StepShape
from engine_core.plan import UNKNOWN, Row, StepPlan
from protocol.messages import SamplingParams

PARAMS = SamplingParams(temperature=0.5, top_k=7, seed=11, choice=1)

HOT = SamplingParams(temperature=2.0, seed=11)
ONE, MIXED = StepShape(1, 0, 1), StepShape(8, 8, 64)


def make_inputs(max_rows: int = 8, max_blocks: int = 6) -> StepInputs:
    return StepInputs(max_rows, max_rows + 100, max_blocks, 16, torch.device("cpu"))


def row(request: int, tokens: list[int], start: int, blocks: list[int], samples: bool = True, **options: Any) -> Row:
    return Row(request, tokens, start, blocks, samples, PARAMS, options.pop("position", 0), **options)


def test_a_mixed_step() -> None:
    inputs = make_inputs()
    first, second = row(1, [50], 17, [3, 4], position=5), row(2, [UNKNOWN], 16, [5, 9])
    chunk, last = row(3, [60, 61, 62], 31, [7, 8, 2], samples=False), row(4, [70, 71], 0, [1])
    inputs.upload(StepPlan(1, [first, second], [chunk, last]), {2: 6}, MIXED)
    assert inputs.tokens[:7].tolist()[0] == 50
    assert inputs.feed[:2].tolist() == [-1, 6]
    assert inputs.tokens[2:7].tolist() == [60, 61, 62, 70, 71]
    assert inputs.positions[:7].tolist() == [17, 16, 31, 32, 33, 0, 1]
    assert inputs.slots[:7].tolist() == [4 * 16 + 1, 9 * 16, 8 * 16 + 15, 2 * 16, 2 * 16 + 1, 16, 17]
    assert inputs.lengths.tolist() == [18, 17, *[0] * 6, 34, 2, *[0] * 6]
    assert inputs.query_start.tolist() == [2, 5, *[7] * 7], "idle prefill rows have no tokens"
    assert inputs.ends.tolist() == [0, 1, 6, 0, 0, 0, 0, 0], "the chunk in mid-prompt doesn't sample"
    inputs.upload(StepPlan(2, [first], []), {2: 6}, ONE)
    inputs.upload(StepPlan(3, [first], []), {2: 6}, ONE)
    inputs.upload(StepPlan(4, [first], []), {2: 6}, ONE)
    assert inputs.ends.tolist() == [0] * 8, "an end of an earlier step may be beyond the tokens of this one"
    inputs.upload(StepPlan(5, [first, second], [chunk, last]), {2: 6}, MIXED)
    for place, shown in zip((0, 1, 8, 9), (first, second, chunk, last), strict=True):
        assert inputs.tables[place, : len(shown.blocks)].tolist() == shown.blocks
    assert inputs.position[:3].tolist() == [5, 0, 0]
    assert inputs.temperature[:3].tolist() == [0.5] * 3
    assert (inputs.top_k[0].item(), inputs.seed[0].item(), inputs.choice[0].item()) == (7, 11, 1)
    assert inputs.slots[7:64].tolist() == [-1] * 57, "idle tokens must not be written"


def test_idle_rows_of_a_bucket_read_and_write_nothing() -> None:
    inputs = make_inputs()
    busy = [row(n, [n], 40, [n, n, n]) for n in range(5)]
    inputs.upload(StepPlan(1, busy, []), {}, StepShape(8, 0, 8))
    inputs.upload(StepPlan(2, busy[:2], []), {}, StepShape(8, 0, 8))
    assert inputs.lengths[:8].tolist() == [41, 41, 0, 0, 0, 0, 0, 0]
    assert inputs.slots[:8].tolist()[2:] == [-1] * 6
    assert inputs.feed.tolist()[2:] == [-1] * 6
    assert inputs.tokens[:8].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


def test_parameters_follow_their_rows() -> None:
    """In each of the buffers, which keep what they were given before."""
    inputs = make_inputs()
    plain, hot = row(1, [0], 16, [1, 2]), replace(row(2, [0], 16, [3, 4]), sampling=HOT)
    for rows in ([plain, hot], [hot, plain], [hot], [plain], [plain, hot]):
        for number in range(4):
            inputs.upload(StepPlan(number, rows, []), {}, StepShape(8, 0, 8))
            assert inputs.temperature[: len(rows)].tolist() == [one.sampling.temperature for one in rows]
            assert inputs.seed[: len(rows)].tolist() == [11] * len(rows)


def test_block_tables_follow_growth_and_swaps() -> None:
    inputs = make_inputs()
    blocks = [4]
    for number in range(3):
        blocks.append(10 + number)
        inputs.upload(StepPlan(number, [row(1, [0], 16, blocks)], []), {}, ONE)
        assert inputs.tables[0, : len(blocks)].tolist() == blocks
    moved = [20, 21, 22, 23]  # it was swapped out and in
    inputs.upload(StepPlan(9, [row(1, [0], 16, moved)], []), {}, ONE)
    assert inputs.tables[0, :4].tolist() == moved


def test_many_requests_come_and_go() -> None:
    inputs = make_inputs(max_rows=4)
    for number in range(50):
        rows = [row(number + n, [n], 20, [number, n]) for n in range(4)]
        inputs.upload(StepPlan(number, rows, []), {}, StepShape(4, 0, 4))
        assert inputs.tables[:4, :2].tolist() == [[number, n] for n in range(4)], number


@pytest.mark.parametrize("place", [15, 16, 17])
def test_the_place_of_a_token_at_a_block_border(place: int) -> None:
    inputs = make_inputs()
    inputs.upload(StepPlan(1, [row(1, [3], place, [7, 5])], []), {}, ONE)
    assert inputs.slots[0].item() == (7 * 16 + 15 if place == 15 else 5 * 16 + place - 16)
