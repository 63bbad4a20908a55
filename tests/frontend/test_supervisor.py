"""The supervisor over real processes that do nothing: each is a few lines of Python."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from frontend import supervisor as module
from frontend.supervisor import API, CORE, Child, Spec, Supervisor
from protocol.errors import StartupError

POLITE = (
    "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True)\nwhile 1: signal.pause()"
)
STUBBORN = (
    "import signal; signal.signal(15, signal.SIG_IGN); print('progress 1 2', flush=True)\nwhile 1: signal.pause()"
)
FAILING = "import sys; sys.exit('loading\\nerror: no such tensor')"


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", code]


class Engine:
    """A supervisor with one dummy per role, and what it said."""

    def __init__(self, base: Path, core: str = POLITE, tokenizer: str = POLITE, api: str = POLITE) -> None:
        self.base = base
        self.lines: list[str] = []
        self.progress: list[tuple[int, int]] = []
        self.healthy = True
        self.changed = asyncio.Event()
        roles = {CORE: core, "tokenizer": tokenizer, API: api}
        self.supervisor = Supervisor(
            lambda directory: [
                Spec(role, python(code), {"PROMETHEUS_MULTIPROC_DIR": str(base)}) for role, code in roles.items()
            ],
            lambda: self.healthy,
            "ready",
            base=base / "run",
            on_progress=lambda done, total: self.progress.append((done, total)),
            on_line=self.hear,
        )

    def hear(self, line: str) -> None:
        self.lines.append(line)
        self.changed.set()

    def child(self, role: str) -> Child:
        return next(child for child in self.supervisor._children if child.spec.role == role)

    def pid(self, role: str) -> int:
        process = self.child(role).process
        assert process is not None
        return process.pid

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)

    async def replaced(self, role: str, pid: int) -> None:
        await self.until(lambda: self.child(role).is_alive and self.pid(role) != pid)

    async def ready(self) -> None:
        await self.until(lambda: self.supervisor._ready)


def play(base: Path, scenario: Any, **codes: str) -> tuple[int, Engine]:
    """Run an engine beside `scenario(engine)`, which must end it; the exit code, with everything checked to be gone."""

    async def main() -> tuple[int, Engine]:
        engine = Engine(base, **codes)
        acting: asyncio.Task[None] = asyncio.create_task(_act(scenario, engine))
        try:
            return await engine.supervisor.run(), engine
        finally:
            await acting

    try:
        return asyncio.run(main())
    finally:
        assert not list((base / "run").iterdir())
        assert not psutil.Process().children(recursive=True)


async def _act(scenario: Any, engine: Engine) -> None:
    step: Coroutine[Any, Any, None] = scenario(engine)
    await step


async def never_healthy(engine: Engine) -> None:
    engine.healthy = False


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_stops_everything_with_code_0(short_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(engine: Engine) -> None:
        await engine.ready()
        stop()

    assert play(short_path, scenario)[0] == 0
    assert capfd.readouterr().out == "ready\n"


@pytest.mark.parametrize("role", ["tokenizer", API])
def test_a_killed_process_is_replaced(short_path: Path, role: str) -> None:
    async def scenario(engine: Engine) -> None:
        await engine.ready()
        pid = engine.pid(role)
        (short_path / f"gauge_liveall_{pid}.db").touch()
        others = [engine.pid(other) for other in (CORE, API, "tokenizer") if other != role]
        os.kill(pid, signal.SIGKILL)
        await engine.replaced(role, pid)
        assert others == [engine.pid(other) for other in (CORE, API, "tokenizer") if other != role]
        stop()

    code, engine = play(short_path, scenario)
    assert code == 0
    assert engine.lines == [f"the {role} was killed by SIGKILL; starting another"]
    assert not list(short_path.glob("*.db"))


def test_three_short_lives_in_a_row_end_everything(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLAME_DELAY", 0.01)

    async def scenario(engine: Engine) -> None:
        await engine.ready()
        for _ in range(3):
            pid = engine.pid("tokenizer")
            os.kill(pid, signal.SIGKILL)
            if engine.child("tokenizer").short_lives < 2:
                await engine.replaced("tokenizer", pid)

    with pytest.raises(StartupError, match=r"the tokenizer was killed by SIGKILL .3 times in a row"):
        play(short_path, scenario)


def test_a_long_life_is_forgiven() -> None:
    child = Child(Spec("tokenizer", []))
    ages = [1.0, 1.0, module.SHORT_LIFE + 1, 1.0, 1.0, 1.0]
    assert [child.may_restart(child.started + age) for age in ages] == [True, True, True, True, True, False]


def test_the_death_of_the_core_ends_everything_within_two_seconds(short_path: Path) -> None:
    killed = 0.0

    async def scenario(engine: Engine) -> None:
        nonlocal killed
        await engine.ready()
        killed = time.monotonic()
        os.kill(engine.pid(CORE), signal.SIGKILL)

    with pytest.raises(StartupError, match=r"^the engine core was killed by SIGKILL$"):
        play(short_path, scenario, tokenizer=STUBBORN)
    assert time.monotonic() - killed < 2.0


def test_the_core_is_blamed_for_what_ends_because_of_it(short_path: Path) -> None:
    async def scenario(engine: Engine) -> None:
        await engine.ready()
        for role in (API, "tokenizer", CORE):
            os.kill(engine.pid(role), signal.SIGKILL)
            await asyncio.sleep(0.01)

    with pytest.raises(StartupError, match=r"^the engine core was killed"):
        play(short_path, scenario)


def test_while_starting_the_core_is_blamed_even_if_it_ends_a_second_later(short_path: Path) -> None:
    slow = "import sys, time; time.sleep(1.0); sys.exit('loading\\nerror: no room:\\nweights 1 GiB\\npool 2 GiB')"
    lines: list[str] = []

    async def scenario(engine: Engine) -> None:
        engine.healthy, engine.lines = False, lines

    with pytest.raises(StartupError, match=r"^the engine core ended: no room:\nweights 1 GiB\npool 2 GiB$"):
        play(short_path, scenario, core=slow, tokenizer="raise SystemExit('error: the core is gone')")
    assert lines == ["loading"], "the reason is said once, and what follows from it not at all"


@pytest.mark.parametrize("role", ["core", "tokenizer", "api"])
def test_a_failed_start_says_the_child_s_own_reason(
    short_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STARTING_BLAME_DELAY", 0.1)
    with pytest.raises(StartupError, match=r"^the .* ended: no such tensor$"):
        play(short_path, never_healthy, **{role: FAILING})


def test_a_stubborn_child_is_killed_after_the_grace_time(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.2)

    async def scenario(engine: Engine) -> None:
        await engine.until(lambda: engine.progress == [(1, 2)])
        stop()

    assert play(short_path, scenario, core=STUBBORN)[0] == 0


def test_a_second_signal_kills_at_once(short_path: Path) -> None:
    started = 0.0

    async def scenario(engine: Engine) -> None:
        nonlocal started
        await engine.until(lambda: engine.progress == [(1, 2)] and len(engine.supervisor._children) == 3)
        started = time.monotonic()
        stop()
        await engine.until(lambda: not engine.child(API).is_alive)
        stop()

    assert play(short_path, scenario, core=STUBBORN)[0] == 0
    assert time.monotonic() - started < module.GRACE / 2


SCRIPT = """
import asyncio, sys
from pathlib import Path
from frontend.supervisor import API, CORE, Spec, Supervisor
command = [sys.executable, "-S", "-E", "-c", {code!r}]
specs = lambda directory: [Spec(role, command) for role in (CORE, "tokenizer", "detokenizer", API)]
print("here", flush=True)
sys.exit(asyncio.run(Supervisor(specs, lambda: True, "ready", base=Path(sys.argv[1]) / "run").run()))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_moment_of_the_start_leaves_nothing(short_path: Path, number: signal.Signals) -> None:
    for tenth in range(5):
        command = [sys.executable, "-c", SCRIPT.format(code=POLITE), str(short_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process:
            process.stdout.readline()
            time.sleep(tenth * 0.03)  # the moment is what is tested
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            process.wait(10)
        psutil.wait_procs(family, timeout=5)
        assert not any(member.is_running() for member in family)
        assert not list((short_path / "run").glob("*"))


def test_children_end_when_the_supervisor_is_killed(short_path: Path) -> None:
    code = "from protocol.lifeline import hold_lifeline; hold_lifeline()\n" + POLITE.replace("up", "progress 1 1")
    script = SCRIPT.format(code=code).replace('"-S", "-E", ', "")
    process = subprocess.Popen([sys.executable, "-c", script, str(short_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        assert [process.stdout.readline() for _ in range(2)] == ["here\n", "ready\n"]
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(family) == 4
    assert not psutil.wait_procs(family, timeout=8)[1]
