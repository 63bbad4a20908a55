"""What is recorded replays to the same decisions; what goes wrong with the file is nobody's problem but the file's."""

import logging
import random
import time
from pathlib import Path

import pytest

from engine_core.capacity import Capacity
from engine_core.recorder import Aborted, Recorder, RecordingScheduler
from engine_core.swap import SwapPolicy
from protocol.errors import StartupError
from tools.replay import main, replay

from .fake_engine import EOS, FakeEngine

CAPACITY = Capacity(24, 4, max_context=1000, max_running=6, prefill_chunk_tokens=16)


def record_random_load(path: Path, seed: int) -> RecordingScheduler:
    """Small pools, shared prefixes, priorities, aborts, copies that are slow or fail."""
    rng = random.Random(seed)
    recorder = Recorder(path)
    scheduler = RecordingScheduler(recorder, CAPACITY, [EOS], SwapPolicy(max_pause=0.05, min_interval=0.02))
    scheduler.grow_host(20)
    engine = FakeEngine(scheduler, lambda: rng.randrange(1, 6), lambda: rng.random() < 0.05)
    for step in range(300):
        if rng.random() < 0.3 and len(scheduler.requests) < 12:
            prompt = [1, 2, 3, 4] * rng.randrange(3) + [rng.randrange(90) for _ in range(rng.randrange(1, 25))]
            engine.add(prompt, rng.randrange(1, 30), priority=rng.randrange(2), cache_salt=rng.choice(["", "a"]))
        if rng.random() < 0.05 and scheduler.requests:
            scheduler.abort(rng.choice(list(scheduler.requests)))
        if step == 150:
            scheduler.grow_host(60)
        engine.step()
    engine.finish()
    recorder.close()
    return scheduler


@pytest.mark.parametrize("seed", range(5))
def test_a_random_load_replays_to_the_same_decisions(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "record"
    scheduler = record_random_load(path, seed)
    outcome = replay(path)
    assert outcome.difference == ""
    assert not outcome.truncated
    assert outcome.unfinished == []
    assert outcome.steps == scheduler.step
    counts = scheduler.counts
    assert (outcome.swapped, outcome.resumed, outcome.recomputed) == (counts.swapped, counts.resumed, counts.recomputed)
    assert outcome.swapped > 5


def test_another_policy_shows_as_the_first_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record"
    record_random_load(path, 0)
    assert main([str(path)]) == 0
    assert "every decision is the same" in capsys.readouterr().out
    monkeypatch.setattr("engine_core.scheduler.victims_for", lambda *_: [])
    assert main([str(path)]) == 1
    assert "first difference" in capsys.readouterr().out


def test_a_record_that_was_cut_is_replayed_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record"
    record_random_load(path, 1)
    data = path.read_bytes()
    for cut in (len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        outcome = replay(path)
        assert outcome.difference == ""
    assert outcome.truncated
    assert main([str(path)]) == 0
    assert "ends in the middle of an entry" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"hello, this is no record", b"\x02\x00\x00\x00\xc0\xc0"])
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "record"
    path.write_bytes(content)
    assert main([str(path)]) == 2


def test_a_full_disk_ends_the_recording_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_core.recorder.FLUSH_SECONDS", 0.01)
    recorder = Recorder(Path("/dev/full"))
    with caplog.at_level(logging.WARNING, "pagetide.core"):
        deadline = time.monotonic() + 10
        while not caplog.records and time.monotonic() < deadline:
            recorder.write(Aborted(1))
        recorder.write(Aborted(1))
        recorder.close()
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_a_disk_that_hangs_ends_the_recording_before_memory_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_core.recorder.MAX_BACKLOG", 1000)
    recorder = Recorder(tmp_path / "record")
    with caplog.at_level(logging.WARNING, "pagetide.core"):
        for number in range(1000):
            recorder.write(Aborted(number))
        recorder.close()
    assert len(caplog.records) == 1


def test_a_file_that_can_not_be_opened_is_told_at_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="can't record to"):
        Recorder(tmp_path / "missing" / "record")
