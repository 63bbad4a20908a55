"""`make bench` in its smallest form, its flags, and its summary."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tools import bench
from tools.bench import CPU, GPU, LIMIT, command_of, main, summarize

from ..engine_core.model.test_dummy import TINY

RESULTS = Path(__file__).parents[2] / "docs" / "results"


class Parsed(Exception):
    """The tool has taken its flags."""


@pytest.mark.parametrize("runs", [CPU, GPU], ids=["cpu", "gpu"])
def test_each_tool_takes_its_flags(runs: dict[str, bench.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        raise Parsed(parse(self, *arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    for run in runs.values():
        module, *flags = command_of(run, "m", "--threads 1 --checkpoint m")
        assert "W4" not in flags
        monkeypatch.setattr(sys, "argv", [module, *flags, "--output", "x.json"])
        with pytest.raises(Parsed):
            importlib.import_module(module).main()


def test_the_smallest_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two benchmarks run, one of them with an engine; one fails, and the others are told of all the same."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    output, folder = tmp_path / "x.json", tmp_path / "each"
    engine = f"--checkpoint {tmp_path} --device null --load-format dummy --iterations 1"
    flags = ["--only", "step,concurrency-fp8,overload", "--engine", f"{engine} --block-size 0"]
    assert main([*flags, "--output", str(output), "--folder", str(folder)]) == 1
    found = json.loads(output.read_text())
    assert found["summary"][0]["figure"].endswith(" us")
    assert [line["figure"] for line in found["summary"][1:]] == ["FAILED", "FAILED"]
    assert (
        main(["--only", "concurrency-fp8", "--engine", engine, "--output", str(output), "--folder", str(folder)]) == 0
    )
    found = json.loads(output.read_text())
    assert [line["what"] for line in found["summary"]] == ["c1", "c2", "c4"]
    assert found["figures"]["concurrency-fp8"]["seconds of the benchmark"] > 0
    assert json.loads((folder / "concurrency-fp8.json").read_text())["levels"]
    assert "== summary, commit " in capsys.readouterr().out


def test_a_summary_of_all_that_docs_have(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures as the benchmarks wrote them."""
    kept = {
        "validation": "kernel-validation", "kernels": "kernels", "small-kernels": "small-kernels", "w4": "w4",
        "copies": "copies", "engine": "engine",
    }  # fmt: skip
    figures = {name: json.loads((RESULTS / f"{file}-h200.json").read_text()) for name, file in kept.items()}
    found = {(line["run"], line["what"]): line["figure"] for line in summarize(GPU, figures)}
    assert found["validation", "kernels against FP64"] == "0 failed"
    assert found["kernels", "device copy"] == f"{figures['kernels']['copy_TB/s']:.2f} TB/s"
    assert found["engine", "pressure"].endswith(" tok/s")
    ours = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in ("oversubscription",)}
    assert [line["what"] for line in summarize(CPU, ours)][1] == "2x work, swap"


def test_failures_are_lines() -> None:
    step = {"total": 812.3, "requests": 256, "exit code": 1}
    lines = summarize(CPU, {"step": step, "serve": {"failed": f"no end within {LIMIT:.0f} s"}})
    assert [line["figure"] for line in lines] == ["812 us", "MISSED", "FAILED"]
    assert lines[2]["beside"] == "no end within 1800 s"
    (line,) = summarize(CPU, {"step": {"total": None, "requests": 256}})
    assert line["figure"] == "FAILED" and "not understood: TypeError" in line["beside"]


def test_no_such_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "kernels"])
    assert "no such benchmark: kernels; there are: step, " in capsys.readouterr().err
