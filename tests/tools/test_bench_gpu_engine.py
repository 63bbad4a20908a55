"""The GPU benchmark's cases, on the CPU with a tiny model."""

import dataclasses
import json
from pathlib import Path

import pytest

from engine_core.memory import describe_plan
from protocol.config import EngineConfig
from tools.bench_gpu_engine import Sizes, cases, in_four_bits, measure, outcome, steady
from tools.streams import Stream

from ..engine_core.model.test_dummy import TINY

SIZES = Sizes(
    short=(20, 12),
    long=(200, 24),
    heavy=(40, 40),
    heavy_streams=6,
    oversubscribed_streams=10,
    long_streams=3,
    bystanders=6,
    probe=8,
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["one", "long", "pressure", "storm", "oversubscribed"])
def test_a_case(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 4}))
    base = EngineConfig(model=str(tmp_path), load_format="dummy", dtype="fp32", threads=1, preemption="swap")
    figures = measure(cases(SIZES)[name], base, 60)
    assert figures["finished"] == figures["requests"] > 0, figures
    assert figures["errors"] == []
    assert figures["tok/s"] > 0
    assert figures["start s"] > 0 and figures["steps"] > 0 < figures["ms/step"]
    if name == "long":
        assert figures["steady tok/s"] > 0, "the first stream was done before the last one began"
    if name in ("pressure", "storm", "oversubscribed"):
        assert figures["requests_swapped"] == figures["requests_resumed"] > 0
    if name == "pressure":
        assert 0 < figures["probe TTFT ms p50"] <= figures["probe TTFT ms max"]
    if name == "storm":
        assert 0 < figures["bystander gap ms p50"] <= figures["bystander gap ms p99"] < figures["longest gap ms"], (
            figures
        )


def test_the_cases_fit_their_contexts() -> None:
    for name, case in cases(Sizes()).items():
        config = EngineConfig(model="m", **case.options)
        assert not config.num_blocks or config.num_blocks * 16 >= config.max_cache, name
    assert cases(Sizes())["pressure"].options["num_blocks"] == 2048


def test_four_bits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    made = in_four_bits(tmp_path, 128, tmp_path)
    plan = describe_plan(EngineConfig(model=str(made), load_format="dummy", dtype="bf16", weights="int4"))
    assert plan["weights_kept"].startswith("int4")


def test_what_is_counted_as_steady() -> None:
    one = Stream([1], 5, submitted=0.0, times=[1.0, 2.0, 3.0, 4.0], counts=[1, 1, 2, 1])
    other = Stream([1], 4, submitted=0.0, times=[1.5, 2.5, 3.5, 4.5], counts=[1] * 4)
    assert steady([one, other]) == {"steady tok/s": 6 / 2.5, "ms/token p50": 1000.0, "ms/token p99": 1000.0}
    assert outcome([one, other])["tok/s"] == 9 / 4.5
    paused = dataclasses.replace(one, notices=[2.5, 2.9])
    assert (paused.gaps, paused.running_gaps) == ([1.0, 1.0, 1.0], [1.0, 1.0])
