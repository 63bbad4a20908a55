"""The swap benchmarks: their parts, and intake against real processes without a model."""

import json
import sys
from pathlib import Path

import pytest

from protocol.messages import Finish, Timing
from tools import bench_cpu_offload, bench_intake, bench_oversubscription
from tools.streams import Stream

from ..engine_core.model.test_dummy import TINY


def test_the_experiment_fills_its_pool_exactly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["x", "--checkpoint", "m", "--block-size", "16", "--max-new-tokens", "8", "--backend", "w4a16"]
    monkeypatch.setattr(sys, "argv", command)
    options = bench_cpu_offload.parse()
    first, second = bench_cpu_offload.make_pair(0, options)
    assert len(first.prompt) + first.max_tokens == len(second.prompt) + second.max_tokens == 48
    assert first.prompt != second.prompt != bench_cpu_offload.make_pair(1, options)[1].prompt
    for wrong, named in (
        (["--backend", "awq"], "w4a16"),
        (["--max-new-tokens", "17"], "17"),
        (["--max-cache", "47"], "47"),
    ):
        monkeypatch.setattr(sys, "argv", command + wrong)
        with pytest.raises(SystemExit):
            bench_cpu_offload.parse()
        assert named in capsys.readouterr().err


def test_intake_of_a_storm_is_held_against_that_of_a_calm() -> None:
    def phase(slowest: float, swaps: float) -> dict[str, object]:
        times = [number / 1000 for number in range(99)] + [slowest]
        return {"times": times, "to_core": times, "steps": 5.0, "requests_swapped": swaps}

    found = bench_intake.summarize({0: [phase(0.1, 0)] * 2, 1: [phase(0.15, 4)] * 2})
    assert [found[f"{what}_ms_quiet"] for what in ("p50", "p99", "max")] == [50, 100, 100]
    assert (found["p99_ratio"], found["goal_met"]) == (1.5, False)
    assert (found["requests_swapped_quiet"], found["requests_swapped_swapping"], found["steps_quiet"]) == (0, 8, 10)
    assert bench_intake.summarize({0: [phase(0.1, 0)], 1: [phase(0.119, 1)]})["goal_met"]


def test_intake_with_random_weights(tmp_path: Path) -> None:
    """They take no text."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"vocab_size": 40000}))
    engine = ["--checkpoint", str(tmp_path), "--device", "null", "--load-format", "dummy", "--iterations", "1"]
    assert bench_intake.main([*engine, "--submits", "5", "--output", str(tmp_path / "x.json")]) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert (found["submits_quiet"], found["submits_swapping"]) == (5, 5)


def test_streams_tell_their_gaps() -> None:
    stream = Stream([1], 4, submitted=1.0, times=[3.0, 3.5, 5.0, 5.25], finish=Finish.LENGTH)
    assert (stream.ttft, stream.gaps, stream.tpot) == (2.0, [0.5, 1.5, 0.25], 0.75)
    assert stream.is_complete
    assert not stream.was_paused
    stream.timing = Timing(0, 1, 0, 0, 1, 0, 0, 0, recomputes=1)
    assert stream.was_paused


def test_ratios_are_taken_within_a_round() -> None:
    def run(speed: float, texts: list[str]) -> dict[str, object]:
        counts = dict.fromkeys(bench_oversubscription.COUNTERS, 1) | {"preempted": 1, "blocks_left_held": 0}
        times = {"ttft_p50_s": 1, "ttft_max_s": 2, "max_silence_preempted_s": speed, "max_silence_others_s": 0}
        return (
            counts | times | {"requests": 2, "completed": 2, "errors": [], "tokens_per_second": speed, "texts": texts}
        )

    rounds = {
        "enough": [run(100, ["a", "b"]), run(10, ["c", "d"])],
        "swap": [run(90, ["a", "x"]), run(12, ["c", "d"])],
    }
    found = bench_oversubscription.summarize(rounds)["swap"]
    assert found["ratios"] == [0.9, 1.2]
    assert (found["requests"], found["same_text_as_enough"], found["max_silence_preempted_s"]) == (4, 3, 90)
