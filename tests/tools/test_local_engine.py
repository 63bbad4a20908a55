"""An engine that a benchmark started doesn't outlive it."""

import json
import subprocess
import sys
from pathlib import Path

import psutil

from tools.local_engine import ROOT

from ..engine_core.model.test_dummy import TINY

BENCHMARK = """
import sys
from pathlib import Path
from protocol.config import EngineConfig
from tools.local_engine import LocalEngine

async def nothing(client): pass

folder = Path(sys.argv[1])
engine = LocalEngine(folder, EngineConfig(str(folder), device="null", load_format="dummy"))
engine.run(nothing)
print(*(process.pid for process in engine.processes), flush=True)
sys.stdin.read()
"""


def test_its_processes_end_when_the_benchmark_is_killed(short_path: Path) -> None:
    (short_path / "config.json").write_text(json.dumps(TINY))
    command = [sys.executable, "-c", BENCHMARK, str(short_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in benchmark.stdout.readline().split()]
        assert len(processes) == 3
        benchmark.kill()
    assert not psutil.wait_procs(processes, timeout=20)[1]
