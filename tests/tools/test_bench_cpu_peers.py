"""The comparison with peers: one that is there, one that isn't, two that die; all beside an engine without a model."""

import json
from pathlib import Path

import pytest

from tools import bench_cpu_peers
from tools.bench_cpu_peers import PEERS, main, parse, summarize

from ..engine_core.model.test_dummy import TINY

THERE = """
class Peer:
    version = "1.0"
    def __init__(self, path, threads):
        assert (path / "config.json").exists()
    def decode(self, prompts, tokens):
        return 100.0 * len(prompts)
    def prefill(self, prompt):
        return float(len(prompt))
"""
ENDS = (
    "import os\nclass Peer:\n    version = '1'\n    def __init__(self, path, threads): pass\n"
    "    def decode(self, prompts, tokens): return 5.0\n    def prefill(self, prompt): os._exit(5)\n"
)
DIES = "import os\nclass Peer:\n    def __init__(self, path, threads): os._exit(4)\n"


def test_peers_are_measured_or_skipped_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, source in {"there": THERE, "dies": DIES, "ends": ENDS}.items():
        (tmp_path / f"peer_that_is_{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = {name: f"peer_that_is_{name}" for name in ("there", "dies", "missing", "ends")}
    monkeypatch.setattr(bench_cpu_peers, "PEERS", modules)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    output = tmp_path / "x.json"
    flags = ["--peers", ",".join(modules), "--streams", "1,3", "--prefill", "40", "--max-new-tokens", "8"]
    engine = ["--checkpoint", str(tmp_path), "--device", "null", "--load-format", "dummy", "--max-cache", "128"]
    assert main([*flags, *engine, "--iterations", "2", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "dies is skipped: its process ended with 4" in printed
    assert "missing is skipped: ModuleNotFoundError" in printed
    assert "ends 1 is left out: its process ended at prefill 40" in printed
    found = json.loads(output.read_text())
    assert set(found["samples"]) == {"pagetide", "there 1.0"}
    assert found["samples"]["there 1.0"] == {
        "decode 1": [100.0, 100.0], "decode 3": [300.0, 300.0], "prefill 40": [40.0, 40.0]
    }  # fmt: skip
    ours = {row["case"]: row for row in found["rows"] if row["engine"] == "pagetide"}
    assert ours["decode 3"]["ms_per_token"] == pytest.approx(3000 / ours["decode 3"]["tokens_per_second"], rel=1e-3)


def test_ratios_are_of_one_round() -> None:
    speeds = {"pagetide": {"decode 2": [50.0, 10.0, 100.0]}, "other 2": {"decode 2": [10.0, 10.0, 10.0]}}
    ours, other = summarize(speeds)
    assert (ours["tokens_per_second"], ours["ms_per_token"]) == (50.0, 40.0)
    assert (other["ratio"], other["ms_per_token"]) == (5.0, 200.0)


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--checkpoint", "m"]).peers == list(PEERS)
    assert parse(["--checkpoint", "m", "--peers", "none"]).peers == []
    for wrong in (["--peers", "vllm"], ["--prefill", "1024"]):
        with pytest.raises(SystemExit):
            parse(["--checkpoint", "m", *wrong])
    assert "no such peer: vllm" in capsys.readouterr().err
