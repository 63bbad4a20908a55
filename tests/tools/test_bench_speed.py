"""The benchmarks of speed and of gaps, against real processes without a model."""

import json
from pathlib import Path

import pytest

from protocol.messages import Finish, Timing
from tools import bench_paged_scheduler, bench_tpot_jitter
from tools.streams import Stream

from ..engine_core.model.test_dummy import TINY

NULL = ["--device", "null", "--load-format", "dummy", "--iterations", "2"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"vocab_size": 400}))
    return tmp_path


def test_a_sweep(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = model / "x.json"
    flags = ["--checkpoint", str(model), "--concurrency", "1,3", "--output", str(output), *NULL]
    assert bench_paged_scheduler.main(flags) == 0
    levels = json.loads(output.read_text())["levels"]
    assert [(level["concurrency"], level["requests"], level["completed"]) for level in levels] == [(1, 2, 2), (3, 6, 6)]
    assert all(level["tokens_per_second"] > 0 and level["ttft_p50_s"] > 0 for level in levels)
    assert 0 < len(levels[1]["samples"]["tpot_s"]) <= 6 * 15  # the first ones may come together
    assert "TPOT p95-p50" in capsys.readouterr().out


def test_what_a_level_amounts_to() -> None:
    one = Stream([1], 3, submitted=0.0, times=[1.0, 1.5, 2.0], counts=[1, 1, 1], finish=Finish.LENGTH)
    other = Stream([1], 3, submitted=0.0, times=[2.0, 3.0, 4.0], counts=[1, 1, 1], error="lost")
    level = bench_paged_scheduler.summarize(2, [[one, other]], floor=0.25)
    assert (level["done"], level["errors"], level["tokens_per_second"]) == ("1/2", ["lost"], 1.5)
    assert (level["tpot_p50_s"], level["tpot_p95_minus_p50_s"], level["share_of_floor"]) == (1.0, 0.0, 0.25)


def test_jitter(model: Path) -> None:
    output = model / "x.json"
    flags = ["--checkpoint", str(model), "--modes", "calm,storm", "--swap-every", "4", "--output", str(output), *NULL]
    assert bench_tpot_jitter.main(flags) == 0
    calm, storm = json.loads(output.read_text())["modes"]
    assert calm["completed"] == storm["completed"] == 8
    assert calm["requests_swapped"] == calm["swapped"] == 0
    assert storm["requests_swapped"] == storm["requests_resumed"] > 0
    assert storm["swapped"] > 0 and storm["samples"]["pause_ms"] and storm["swapped_tpot_p50_s"] > 0
    assert calm["bystander_p99_ratio"] == 1.0


def test_pauses_and_bystanders_are_told_apart() -> None:
    swapped = Stream([1], 4, times=[1.0, 2.0, 5.0, 5.5], counts=[1] * 4, notices=[2.5, 4.5])
    swapped.timing = Timing(0, 6, 0, 0, 1, 0, 3, 0, swaps=1)
    other = Stream([1], 4, times=[1.0, 2.0, 3.0, 4.0], counts=[1] * 4)
    assert bench_tpot_jitter.split(swapped) == ([3.0], [1.0, 0.5])
    found = bench_tpot_jitter.summarize([swapped, other])
    assert (found["swapped"], found["pause_ms_max"], found["bystander_gap_ms_max"]) == (1, 3000, 1000)
    assert (found["swapped_tpot_p50_s"], found["other_tpot_p50_s"]) == (1.5, 1.0)


def test_the_tight_pool_is_half_of_the_need(capsys: pytest.CaptureFixture[str]) -> None:
    options = bench_tpot_jitter.parse(["--checkpoint", "m", "--concurrency", "4"])
    configs = bench_tpot_jitter.configs(options)
    assert {mode: config.num_blocks for mode, config in configs.items()} == {"calm": 64, "storm": 64, "tight": 16}
    for wrong in (["--modes", "x"], ["--concurrency", "1"], ["--prompt-tokens", "250"]):
        with pytest.raises(SystemExit):
            bench_tpot_jitter.parse(["--checkpoint", "m", *wrong])
    assert "no such mode: x" in capsys.readouterr().err
