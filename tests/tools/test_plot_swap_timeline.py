"""The timeline of a record says what the scheduler did, and the picture gets drawn."""

import json
from pathlib import Path

import pytest

from engine_core.request import State
from tools.plot_swap_timeline import draw, main, make_streams, parse, read_timeline, record_run

from ..engine_core.model.test_dummy import TINY
from ..engine_core.test_recorder import record_random_load

PNG = b"\x89PNG"


def test_a_random_load(tmp_path: Path) -> None:
    path = tmp_path / "record"
    scheduler = record_random_load(path, 3)
    timeline = read_timeline(path)
    assert (timeline.swapped, timeline.recomputed) == (scheduler.counts.swapped, scheduler.counts.recomputed)
    assert timeline.swapped > 5
    assert any(state is State.SWAPPED for lane in timeline.lanes for state, _, _ in lane.phases)
    for lane in timeline.lanes:
        assert len(lane.tokens) == len(lane.request.output)
        assert lane.tokens == sorted(lane.tokens)
        assert all(before[2] == after[1] for before, after in zip(lane.phases, lane.phases[1:], strict=False))
        seconds = [sum(b - a for state, a, b in lane.phases if state is which) for which in State]
        assert seconds[:-1] == pytest.approx(lane.request.spent)
    for pools in timeline.pools:
        assert 0 <= pools.held + pools.moving + pools.cached <= timeline.num_blocks
        assert min(pools.held, pools.claimed, pools.copies) >= 0
    draw(timeline, tmp_path / "all.png")
    draw(timeline, tmp_path / "part.png", begin=0.01, end=0.1, note="part")
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in ("all.png", "part.png"))


def test_a_run_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"vocab_size": 40000}))
    streams = make_streams(3)
    record_run(tmp_path, tmp_path / "record", streams, 0, load_format="dummy", dtype="fp32", swap_every=20)
    timeline = read_timeline(tmp_path / "record")
    assert sorted(len(lane.tokens) for lane in timeline.lanes) == sorted(stream.max_tokens for stream in streams)
    assert timeline.swapped > 0
    assert all(lane.phases[-1][0] is not State.FINISHED for lane in timeline.lanes)
    assert main([str(tmp_path / "record"), str(tmp_path / "run.png")]) == 0
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)


def test_what_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "record").write_bytes(b"no record")
    assert main([str(tmp_path / "record"), str(tmp_path / "x.png")]) == 2
    assert "error: " in capsys.readouterr().err
    for wrong in (["x.png"], ["--run", "record", "x.png"], ["--run", "--requests", "9", "x.png"]):
        with pytest.raises(SystemExit):
            parse(wrong)
