"""An engine's processes, as `pagetide serve` starts them but without supervisor and HTTP: for benchmarks and tests.

They end with the process that started them, even if that is killed.

For profilers, the core can be a part of this process instead. Its step loop then has the thread that calls `run_with`,
and the coroutine another one. They share the GIL, so times are not those of an engine.
"""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine_core.core import EngineCore, open_core
from frontend.engine_client import EngineClient
from protocol.config import EngineConfig, dump_config
from protocol.lifeline import Lifeline
from protocol.runtime_dir import RuntimeDir

ROOT = Path(__file__).parents[1]


class LocalEngine:
    """The processes of one engine, and coroutines run against it."""

    core: "subprocess.Popen[bytes]"  # or there is a `core_here`
    core_here: EngineCore | None = None

    def __init__(self, directory: Path, config: EngineConfig, in_process: bool = False) -> None:
        """With `in_process` the core's model is loaded here and now: raises StartupError."""
        self.runtime = RuntimeDir(directory)
        self._lifeline, self._stack = Lifeline(), ExitStack()
        self.path = self.runtime.path
        if not in_process:
            arguments = "serve", "--directory", str(self.path), "--config", dump_config(config)
            self.core = self._popen(["-m", "engine_core", *arguments], stdout=subprocess.DEVNULL)
        self.tokenizers = [self._service("tokenizer")]
        self.detokenizers = [self._service("detokenizer")]
        if in_process:
            try:
                self.core_here = self._stack.enter_context(open_core(config, self.path, lambda done, total: None))
            except BaseException:
                self.stop()
                raise

    def _service(self, role: str) -> "subprocess.Popen[bytes]":
        code = f"import sys, pathlib, frontend.services as s; sys.exit(s.run_{role}(pathlib.Path(sys.argv[1])))"
        return self._popen(["-c", code, str(self.path)])

    def _popen(self, arguments: list[str], stdout: int | None = None) -> "subprocess.Popen[bytes]":
        environment, descriptors = {**os.environ, **self._lifeline.environment}, [self._lifeline.read_end]
        command = [sys.executable, *arguments]
        return subprocess.Popen(command, cwd=ROOT, stdout=stdout, env=environment, pass_fds=descriptors)

    def add(self, role: str) -> None:
        """One more tokenizer or detokenizer."""
        getattr(self, role + "s").append(self._service(role))

    @property
    def processes(self) -> "list[subprocess.Popen[bytes]]":
        core = [self.core] if hasattr(self, "core") else []
        return [*core, *self.tokenizers, *self.detokenizers]

    def run(self, scenario: Callable[[EngineClient], Coroutine[Any, Any, Any]], seconds: float = 60.0) -> Any:
        """Run a coroutine with a client; its result."""

        async def main() -> Any:
            client = await EngineClient.connect(self.path, 60)
            try:
                async with asyncio.timeout(seconds):
                    return await scenario(client)
            finally:
                await client.close()

        return run_with([self], main())

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._lifeline.cut()
        self._stack.close()
        if self.core_here is not None:
            self.core_here = None
            gc.collect()  # its threads and it hold each other; the next engine's model needs the memory
        self.runtime.remove()


def run_with(engines: Sequence[LocalEngine], scenario: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine against engines; its result. Of cores in this process the first one's loop has this thread."""
    cores = [engine.core_here for engine in engines if engine.core_here is not None]
    if not cores:
        return asyncio.run(scenario)
    found: list[Any] = []
    failures: list[BaseException] = []

    def attempt(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)
        finally:  # whichever ends first, ends all
            for core in cores:
                core.stop()

    for core in cores:
        core.stopping = False
    loops = [threading.Thread(target=attempt, args=(core.run,), daemon=True) for core in cores[1:]]
    client = threading.Thread(target=attempt, args=(lambda: found.append(asyncio.run(scenario)),), daemon=True)
    for thread in (*loops, client):
        thread.start()
    attempt(cores[0].run)
    for thread in loops:
        thread.join()
    if failures:
        raise failures[0]
    return found[0]
