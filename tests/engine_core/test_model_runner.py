"""The real model in FP32 gives the reference's greedy tokens, however its steps are cut; sampling is wired in."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_core.model_runner import ModelRunner, load_runner
from engine_core.plan import Row, StepPlan
from protocol.config import EngineConfig
from protocol.messages import SamplingParams

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2-greedy.json").read_text())["cases"]
BLOCKS = 32  # per request
CLOSE = 0.01  # a smaller margin between the two best leaves the choice to rounding

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def runner(default_model: Path) -> ModelRunner:
    config = EngineConfig(
        model=str(default_model), dtype="fp32", weights="dense", max_cache=512, num_blocks=16 * BLOCKS
    )
    return load_runner(config)


class Stream:
    """One case being decoded: holds what the reference says comes next."""

    def __init__(self, number: int) -> None:
        self.case, self.number = CASES[number], number
        self.ids: list[int] = self.case["prompt_ids"]
        self.blocks = list(range(number * BLOCKS, (number + 1) * BLOCKS))[::-1]
        self.output: list[int] = []

    def row(self, start: int, count: int, **sampling: float) -> Row:
        known = self.ids + self.output
        params = SamplingParams(temperature=0.0, **sampling)  # type: ignore[arg-type]
        last = start + count == len(known)
        tokens = known[start : start + count]
        return Row(self.number, tokens, start, self.blocks, last, params, len(self.output), self.ids, self.output)

    def decode_row(self) -> Row:
        return self.row(len(self.ids) + len(self.output) - 1, 1)

    def take(self, token: int) -> None:
        """Check a token, then go on with the reference's."""
        step = len(self.output)
        best, second, third = self.case["top3_logprobs"][step]
        allowed = {best[0], second[0], third[0]} if best[1] - second[1] < CLOSE else {self.case["greedy_ids"][step]}
        assert token in allowed, f"case {self.number}, step {step}: {token}, expected {allowed}"
        self.output.append(self.case["greedy_ids"][step])


def prefill(runner: ModelRunner, stream: Stream, chunk: int) -> None:
    for start in range(0, len(stream.ids), chunk):
        row = stream.row(start, min(chunk, len(stream.ids) - start))
        tokens = runner.launch(StepPlan(0, [], [row])).tokens().tokens
    stream.take(tokens[0])


def test_greedy_alone(runner: ModelRunner) -> None:
    for number in range(0, len(CASES), 4):
        stream = Stream(number)
        prefill(runner, stream, 512)
        for _ in range(31):
            (token,) = runner.launch(StepPlan(0, [stream.decode_row()], [])).tokens().tokens
            stream.take(token)


def test_greedy_batched_and_chunked(runner: ModelRunner) -> None:
    """All cases at once; each starts in chunks of 7 beside the others' decode rows."""
    running: list[Stream] = []
    for number in range(len(CASES)):
        stream = Stream(number)
        for start in range(0, len(stream.ids), 7):
            row = stream.row(start, min(7, len(stream.ids) - start))
            active = [other for other in running if len(other.output) < 32]
            plan = StepPlan(0, [other.decode_row() for other in active], [row])
            tokens = runner.launch(plan).tokens().tokens
            for other, token in zip(active, tokens, strict=False):
                other.take(token)
        stream.take(tokens[-1])
        running.append(stream)
    while active := [stream for stream in running if len(stream.output) < 32]:
        tokens = runner.launch(StepPlan(0, [stream.decode_row() for stream in active], [])).tokens().tokens
        for stream, token in zip(active, tokens, strict=True):
            stream.take(token)


def test_logprobs(runner: ModelRunner) -> None:
    """Those of the token and of the prompt, in one chunk and in several."""
    stream = Stream(0)
    count = len(stream.ids)
    result = runner.launch(StepPlan(0, [], [stream.row(0, count, logprobs=3, prompt_logprobs=1)])).tokens()
    top = result.logprobs[0]
    assert list(zip(memoryview(top.top_ids).cast("i"), top.top_logprobs, strict=True)) == [
        (token, pytest.approx(logprob, abs=1e-3)) for token, logprob in stream.case["top3_logprobs"][0]
    ]
    whole = result.prompt_logprobs[0]
    assert [entry.token for entry in whole] == stream.ids[1:]
    parts = [runner.launch(StepPlan(0, [], [stream.row(start, size, prompt_logprobs=1)])).tokens().prompt_logprobs[0]
             for start, size in ((0, 2), (2, count - 3))]  # fmt: skip
    assert [entry.logprob for part in parts for entry in part] == pytest.approx(
        [entry.logprob for entry in whole], abs=1e-4
    )


def test_poisoned_row_ends_alone(runner: ModelRunner) -> None:
    """A request whose KV is NaN gets token -1; its neighbour is untouched, and so is who reuses its blocks."""
    bad, good = Stream(1), Stream(0)
    prefill(runner, bad, 512)
    prefill(runner, good, 512)
    runner.store.pool[bad.blocks[0]] = 0xFF
    tokens = runner.launch(StepPlan(0, [bad.decode_row(), good.decode_row()], [])).tokens().tokens
    assert tokens[0] == -1
    good.take(tokens[1])
    heir = Stream(1)
    prefill(runner, heir, 512)


def test_loading_reports_progress(default_model: Path) -> None:
    seen: list[tuple[int, int]] = []
    record: Callable[[int, int], None] = lambda done, total: seen.append((done, total))  # noqa: E731
    load_runner(EngineConfig(model=str(default_model), dtype="fp32", max_cache=64, num_blocks=4), record)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
