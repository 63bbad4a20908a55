"""`pagetide serve`: starts every process of an engine, watches them, and leaves nothing behind.

    STARTING --all healthy--> READY --signal, core's death, give up--> STOPPING --all ended--> exit code

While STARTING, any child's death ends everything, with the child's own reason. When READY, a dead tokenizer,
detokenizer or API server is replaced, and the core's death ends everything. A first signal stops politely, a second
one kills.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import StartupError
from protocol.lifeline import Lifeline, hold_lifeline
from protocol.runtime_dir import RuntimeDir

CORE = "engine core"
API = "API server"
SHORT_LIFE = 10.0  # seconds; a process that dies younger counts as failed
MAX_SHORT_LIVES = 3  # in a row, then everything ends
BLAME_DELAY = 0.5  # seconds to see whether the core's death explains another process's
STARTING_BLAME_DELAY = 2.0  # the same while starting, when the reason matters more than the time
API_GRACE = 5.0  # seconds for running streams to end
GRACE = 3.0  # seconds from SIGTERM to SIGKILL for all others
CRASH_GRACE = 1.0  # the same after the core's death: there is nothing left to finish
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Spec:
    """A process to keep running. `command` is its argument vector."""

    role: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """One place among the processes: the process that fills it now, and how its predecessors fared."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        self.started = 0.0
        self.short_lives = 0
        self.last_line = ""
        self.error: list[str] = []  # its lines from `error: ` on
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.returncode is None

    def may_restart(self, now: float) -> bool:
        """Count this death; whether another try is due."""
        self.short_lives = self.short_lives + 1 if now - self.started < SHORT_LIFE else 0
        return self.short_lives < MAX_SHORT_LIVES

    def reason(self) -> str:
        """Why the process ended; one line, unless its own error has more."""
        assert self.process is not None
        assert self.process.returncode is not None
        code = self.process.returncode
        if code < 0:
            return f"the {self.spec.role} was killed by {signal.Signals(-code).name}"
        last = "\n".join(self.error).removeprefix("error: ") or self.last_line
        return f"the {self.spec.role} ended: {last}" if last else f"the {self.spec.role} ended with code {code}"

    def send(self, number: signal.Signals) -> None:
        """Signal its process, if it runs."""
        if self.process is not None and self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


class Supervisor:
    """Runs one engine's processes until a signal or a failure; make one per start and `run` it once."""

    def __init__(
        self,
        specs: Callable[[Path], list[Spec]],
        is_healthy: Callable[[], bool],
        ready_line: str,
        *,
        base: Path | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_line: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        """`specs` gives the processes for a runtime directory (core first); `is_healthy` may block for a second.

        `on_progress` gets the core's bytes loaded and in all, `on_line` each line that a child writes for people.
        """
        self._make_specs, self._is_healthy, self._ready_line, self._base = specs, is_healthy, ready_line, base
        self._on_progress, self._on_line = on_progress, on_line
        self._children: list[Child] = []
        self._stop = asyncio.Event()
        self._failure = ""
        self._signals = 0
        self._ready = False
        self._replacements: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Everything from the first process to the last; 0 after a signal, 1 after a failure. Raises StartupError."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        hold_lifeline()
        runtime = RuntimeDir(self._base)
        self._lifeline = Lifeline()
        try:
            for spec in self._make_specs(runtime.path):
                if self._stop.is_set():
                    break
                child = Child(spec)
                self._children.append(child)
                await self._start(child)
            waiting = asyncio.create_task(self._announce())
            await self._stop.wait()
            waiting.cancel()
            await self._end()
        finally:
            for child in self._children:
                child.send(signal.SIGKILL)
            self._lifeline.cut()
            runtime.remove()
        if self._failure:
            raise StartupError(self._failure)
        return 0

    # -- one process -------------------------------------------------------------------------------------------

    async def _start(self, child: Child) -> None:
        """Start a process in a process group of its own: Ctrl-C in the terminal is for the supervisor only."""
        child.process = await asyncio.create_subprocess_exec(
            *child.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **child.spec.environment, **self._lifeline.environment},
            pass_fds=[self._lifeline.read_end],
            process_group=0,
        )
        child.started = time.monotonic()
        child.last_line, child.error = "", []
        assert child.process.stdout is not None
        assert child.process.stderr is not None
        errors = asyncio.create_task(self._pass_on(child, child.process.stderr))
        output = asyncio.create_task(self._read_output(child.process.stdout))
        child.tasks = [errors, output, asyncio.create_task(self._watch(child, child.process, errors))]

    async def _pass_on(self, child: Child, stream: asyncio.StreamReader) -> None:
        """Show what a child logs. Its error is told with its end, unless a signal or another's end explains that."""
        async for text in _lines(stream):
            if child.error or text.startswith("error: "):
                child.error.append(text)
                continue
            child.last_line = text.strip() or child.last_line
            self._on_line(text)

    async def _read_output(self, stream: asyncio.StreamReader) -> None:
        """The core's `progress DONE TOTAL` lines; whatever else there is goes unheard."""
        async for text in _lines(stream):
            match text.split():
                case ["progress", done, total] if done.isdigit() and total.isdigit():
                    self._on_progress(int(done), int(total))

    async def _watch(self, child: Child, process: asyncio.subprocess.Process, errors: "asyncio.Task[None]") -> None:
        await process.wait()
        await asyncio.wait([errors], timeout=0.2)  # its last line; a grandchild may hold the pipe open
        if self._stop.is_set():
            return
        if child.spec.role != CORE:
            # What depends on the core ends with it, and may be seen to end first.
            delay = BLAME_DELAY if self._ready else STARTING_BLAME_DELAY
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay)
            if self._stop.is_set():
                return
        _forget_gauges(child.spec, process.pid)
        if child.spec.role == CORE or not self._ready:
            self._fail(child.reason())
        elif not child.may_restart(time.monotonic()):
            self._fail(f"{child.reason()} ({MAX_SHORT_LIVES} times in a row within {SHORT_LIFE:.0f} s of its start)")
        else:
            self._on_line(f"{child.reason()}; starting another")
            replacement = asyncio.create_task(self._start(child))
            self._replacements.add(replacement)
            replacement.add_done_callback(self._replacements.discard)

    # -- all processes -----------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        while not await asyncio.to_thread(self._is_healthy):
            await asyncio.sleep(0.05)
        self._ready = True
        print(self._ready_line, flush=True)

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            for child in self._children:
                child.send(signal.SIGKILL)

    def _fail(self, reason: str) -> None:
        if not self._stop.is_set():
            self._failure = reason
            self._stop.set()

    async def _end(self) -> None:
        """Stop all: API servers first, so that running streams can end while the engine still runs."""
        for replacement in list(self._replacements):
            await replacement
        servers = [child for child in self._children if child.spec.role == API]
        if self._failure:
            await _stop_all(self._children, CRASH_GRACE)
        else:
            await _stop_all(servers, API_GRACE)
            await _stop_all(self._children, GRACE)


async def _stop_all(children: Sequence[Child], grace: float) -> None:
    """SIGTERM, then SIGKILL to what is left after `grace` seconds; returns when all have ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            child.send(number)
        ended = [asyncio.ensure_future(child.process.wait()) for child in children if child.process is not None]
        if ended and not (await asyncio.wait(ended, timeout=grace))[1]:
            break
    tasks = [task for child in children for task in child.tasks]
    if tasks:
        await asyncio.wait(tasks, timeout=0.2)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines without their end, in pieces where one is longer than the reader's buffer."""
    while True:
        try:
            line = await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            line = error.partial
        except asyncio.LimitOverrunError as error:
            line = await stream.read(error.consumed)
        if not line:
            return
        yield line.decode(errors="replace").rstrip("\n")


def _forget_gauges(spec: Spec, pid: int) -> None:
    """Drop a dead API server's live gauges, as prometheus_client asks of whoever sees a worker die."""
    folder = spec.environment.get("PROMETHEUS_MULTIPROC_DIR")
    for path in Path(folder).glob(f"gauge_live*_{pid}.db") if folder else ():
        path.unlink(missing_ok=True)
