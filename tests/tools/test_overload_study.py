"""A machine is found again in a record of it, and the study compares like with like."""

import json
import random
from pathlib import Path

import pytest

from engine_core.recorder import Recorder, RecordingScheduler
from engine_core.swap import SwapPolicy
from tools import overload_study
from tools.fit_machine import Samples, fit, read_samples
from tools.traces import TraceRequest
from tools.virtual_engine import EOS, Machine, VirtualEngine, capacity_of

from ..engine_core.model.test_dummy import TINY

CURVE = ((0, 2e-3), (1, 5e-3), (2, 6e-3), (3, 9e-3), (30, 18e-3))
MACHINE = Machine(0.0, 0.0, 3e-4, 2e-6, 0.0, 1e-4, 1e9, 1e9, 368_640, 512, 30, 16, CURVE)


def test_a_step_follows_the_curve() -> None:
    seconds = [MACHINE._decode_seconds(rows) for rows in (0, 1, 2, 3, 12, 30, 57)]
    assert seconds == pytest.approx([2e-3, 5e-3, 6e-3, 9e-3, 12e-3, 18e-3, 27e-3])


def test_a_record_gives_the_machine(tmp_path: Path) -> None:
    trace = [TraceRequest(n, 0.05 * n, 20 + 7 * (n % 20), 30 + 5 * (n % 9)) for n in range(120)]
    recorder = Recorder(tmp_path / "x.record")
    policy = SwapPolicy("swap", swap_every=3)
    scheduler = RecordingScheduler(recorder, capacity_of(MACHINE, 900, 512, prefix_cache=False), [EOS], policy)
    scheduler.grow_host(4000)
    VirtualEngine(scheduler, MACHINE, 0).run(trace)
    recorder.close()
    found = fit(read_samples(tmp_path / "x.record"))
    assert (found.token, found.read) == pytest.approx((MACHINE.token, MACHINE.read), rel=0.02)
    for rows in (1, 2, 3, 8, 20):
        assert found._decode_seconds(rows) == pytest.approx(MACHINE._decode_seconds(rows), rel=0.02)
    assert (found.latency, found.bandwidth) == pytest.approx((MACHINE.latency, MACHINE.bandwidth), rel=0.02)
    assert (found.block_bytes, found.max_running) == (MACHINE.block_bytes, MACHINE.max_running)


def test_steps_that_scatter_come_out_right_in_sum() -> None:
    """On a busy machine a step may take a multiple; weights by what was measured would expect the harmonic mean."""
    draw, samples = random.Random(1), Samples(capacity_of(MACHINE, 100, 512))
    for number in range(4000):
        rows, tokens = number % 20, 40.0 * (number % 3 == 0)
        scatter = draw.choice((0.6, 0.8, 1.6))
        seconds = MACHINE._decode_seconds(rows) + MACHINE.token * tokens
        samples.steps.append(([float(rows), tokens, 0.0, 0.0], seconds * scatter))
    found = fit(samples)
    expected = [found._decode_seconds(int(rows)) + found.token * tokens for (rows, tokens, *_), _ in samples.steps]
    assert sum(expected) == pytest.approx(sum(seconds for _, seconds in samples.steps), rel=1e-3)


def test_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr(overload_study, "LEVELS", (1, 3))
    output, picture = tmp_path / "x.json", tmp_path / "x.png"
    flags = ["--checkpoint", str(tmp_path), "--device", "null", "--load-format", "dummy", "--iterations", "1"]
    load = ["--requests", "16", "--pressures", "2", "--utilisation", "8", "--answers", "32,40"]
    assert overload_study.main([*flags, *load, "--output", str(output), "--plot", str(picture)]) == 0
    found = json.loads(output.read_text())
    rows = {row["policy"]: row for row in found["rows"]}
    assert list(rows) == ["enough", "swap", "recompute"]
    for row in rows.values():
        for kind in ("real", "simulated", "refitted"):
            assert row[kind]["tokens_per_second"] > 0 and row[kind]["ttft_p50_s"] > 0
        wanted = row["simulated"]["tokens_per_second"] / row["real"]["tokens_per_second"] - 1
        assert row["errors"]["simulated"]["tokens_per_second"] == pytest.approx(wanted, abs=1e-4)
    assert rows["enough"]["real"]["preempted"] == rows["enough"]["simulated"]["preempted"] == 0
    assert rows["enough"]["errors"]["simulated"]["swaps"] is None
    assert rows["swap"]["real"]["recomputes"] == rows["recompute"]["real"]["swaps"] == 0
    assert rows["swap"]["blocks"] == rows["recompute"]["blocks"] < rows["enough"]["blocks"]
    assert picture.stat().st_size > 5000
    assert "simulated median" in capsys.readouterr().out


def test_what_can_not_be(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--requests", "0"], ["--pressures", "0,1"], ["--utilisation", "0"]):
        with pytest.raises(SystemExit):
            overload_study.parse(["--checkpoint", "m", *wrong])
    assert "out of range" in capsys.readouterr().err
