"""Flags, percentiles, tables and JSON that the benchmarks share."""

import argparse
import json
from math import isnan
from pathlib import Path

import pytest
from typer.testing import CliRunner

from frontend import launch
from frontend.cli import app
from protocol.config import EngineConfig
from tools.measurement import checked, command_line, config_of, parser_of, percentile, print_table, save, token_times
from tools.streams import Stream

ARTICLE = """
--checkpoint D:/Qwen3B-W4A16 --backend w4a16 --max-cache 128 --max-new-tokens 8 --prefill-chunk-tokens 32
--kv-cache-dtype fp8 --no-prefix-cache --block-size 16 --max-cpu-offload-mb 256 --iterations 5 --output x.json
"""


def test_the_flags_of_the_article() -> None:
    options = checked(parser_of(""), ARTICLE.split())
    config = config_of(options, max_running=3)
    expected = EngineConfig(
        model="D:/Qwen3B-W4A16",
        weights="int4",
        max_cache=128,
        prefill_chunk_tokens=32,
        kv_cache_dtype="fp8",
        prefix_cache=False,
        max_cpu_offload_mb=256,
        max_running=3,
    )
    assert config == expected
    assert (options.iterations, options.output) == (5, Path("x.json"))


@pytest.mark.parametrize(
    "wrong", [["--iterations", "0"], ["--block-size", "0"], ["--max-new-tokens", "256"], ["--backend", "w3"]]
)
def test_what_can_not_be(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        checked(parser_of(""), ["--checkpoint", "m", *wrong])
    assert wrong[1] in capsys.readouterr().err


def test_a_command_line_gives_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(
        model="m",
        device="null",
        prefix_cache=False,
        overlap=False,
        cpu_offload=False,
        max_cache=99,
        max_pause=0.125,
        swap_every=3,
        gpu_memory=1 << 30,
    )
    got: list[EngineConfig] = []

    def serve(config: EngineConfig, options: launch.ServeOptions) -> int:
        got.append(config)
        return 0

    monkeypatch.setattr(launch, "serve", serve)
    result = CliRunner().invoke(app, ["serve", "m", *command_line(config)])
    assert result.exit_code == 0, result.output
    assert got == [config]


def test_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = [float(number) for number in range(100)]
    assert [percentile(values, share) for share in (0.5, 0.95, 1.0)] == [50, 95, 99]
    assert isnan(percentile([], 0.5))
    stream = Stream([1], 5, times=[1.0, 2.0, 4.0], counts=[1, 1, 2])
    assert token_times([stream]) == [1.0, 1.0, 1.0]
    print_table([{"a": "x", "b": 1.25}, {"a": "longer", "b": float("nan")}], [("", "a", "s"), ("B", "b", ".1f")])
    assert capsys.readouterr().out == "          B\nx       1.2\nlonger    -\n"
    options = argparse.Namespace(output=tmp_path / "x.json", checkpoint=tmp_path / "model", rate=2)
    save(options, {"samples": [1.0, 2.5], "nothing": float("nan"), "each": [{"a": 0.12345678}]})
    text = options.output.read_text()
    assert '"samples": [ 1.0, 2.5 ]' in text
    found = json.loads(text)
    assert found["options"] == {"checkpoint": "model", "rate": 2}
    assert (found["nothing"], found["each"]) == (None, [{"a": 0.123457}])
    assert str(tmp_path) not in text
