"""An engine that a benchmark started doesn't outlive it; with --in-process its step loop is where a profiler looks."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from engine_core.core import EngineCore, EngineStuck
from frontend.engine_client import EngineClient
from protocol.config import EngineConfig
from protocol.errors import StartupError
from tools import bench_paged_scheduler
from tools.local_engine import ROOT, LocalEngine, run_with
from tools.measurement import engine, make_streams, run_all

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


@pytest.fixture
def tiny(short_path: Path) -> EngineConfig:
    (short_path / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 2}))
    return EngineConfig(str(short_path), load_format="dummy", threads=1, max_cache=64, num_blocks=16)


async def ask(client: EngineClient) -> list[bool]:
    streams = make_streams(client, 3, (9, 4))
    await run_all(client, streams)
    return [stream.is_complete for stream in streams]


def test_a_benchmark_in_one_process_has_the_step_loop_in_its_main_thread(
    tiny: EngineConfig, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, threads = EngineCore.run, list[threading.Thread]()

    def seen(core: EngineCore) -> None:
        threads.append(threading.current_thread())
        run(core)

    monkeypatch.setattr(EngineCore, "run", seen)
    output = short_path / "figures.json"
    arguments = ["--checkpoint", tiny.model, "--load-format", "dummy", "--threads", "1", "--max-cache", "64"]
    arguments += ["--prompt-tokens", "9", "--max-new-tokens", "4", "--concurrency", "1,3", "--iterations", "1"]
    assert bench_paged_scheduler.main([*arguments, "--in-process", "--output", str(output)]) == 0
    assert threads == [threading.main_thread()]
    assert [level["completed"] for level in json.loads(output.read_text())["levels"]] == [1, 3]


def test_engines_in_one_process_run_side_by_side_and_again(tiny: EngineConfig) -> None:
    async def both() -> list[bool]:
        clients = [await EngineClient.connect(one.path) for one in (first, second)]
        found = [done for client in clients for done in await ask(client)]
        for client in clients:
            await client.close()
        return found

    with engine(tiny, in_process=True) as first, engine(tiny, in_process=True) as second:
        assert [len(one.processes) for one in (first, second)] == [2, 2]
        for _ in range(2):
            assert first.run(ask) == [True] * 3
        assert run_with([first, second], both()) == [True] * 6
    assert first.core_here is None


@pytest.mark.parametrize("broken", [0, 1])
def test_what_ends_a_step_loop_in_this_process_is_raised(tiny: EngineConfig, broken: int) -> None:
    def fail() -> None:
        raise EngineStuck("no step has ended")

    async def forever() -> None:
        await asyncio.Event().wait()

    with engine(tiny, in_process=True) as first, engine(tiny, in_process=True) as second:
        engines = [first, second]
        engines[broken].core_here._take_in = fail  # type: ignore[union-attr, method-assign]
        with pytest.raises(EngineStuck, match="no step has ended"):
            run_with(engines, forever())


def test_what_a_client_of_such_an_engine_raises_is_raised(tiny: EngineConfig) -> None:
    async def fail(client: EngineClient) -> None:
        raise RuntimeError("a stream ended")

    with engine(tiny, in_process=True) as running, pytest.raises(RuntimeError, match="a stream ended"):
        running.run(fail)


def test_a_model_that_does_not_load_leaves_nobody(short_path: Path) -> None:
    before = psutil.Process().children()
    with pytest.raises(StartupError):
        LocalEngine(short_path, EngineConfig(str(short_path / "nothing")), in_process=True)
    assert psutil.Process().children() == before
