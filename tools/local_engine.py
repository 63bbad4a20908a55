"""An engine's processes, as `pagetide serve` starts them but without supervisor and HTTP: for benchmarks and tests.

They end with the process that started them, even if that is killed.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from frontend.engine_client import EngineClient
from protocol.config import EngineConfig, dump_config
from protocol.lifeline import Lifeline
from protocol.runtime_dir import RuntimeDir

ROOT = Path(__file__).parents[1]


class LocalEngine:
    """The processes of one engine, and coroutines run against it."""

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        self.runtime = RuntimeDir(directory)
        self._lifeline = Lifeline()
        self.path = self.runtime.path
        self.core = self._start("engine_core", "serve", "--directory", str(self.path), "--config", dump_config(config))
        self.tokenizers = [self._service("tokenizer")]
        self.detokenizers = [self._service("detokenizer")]

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        return self._popen(["-m", *arguments], stdout=subprocess.DEVNULL)

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
        return [self.core, *self.tokenizers, *self.detokenizers]

    def run(self, scenario: Callable[[EngineClient], Coroutine[Any, Any, Any]], seconds: float = 60.0) -> Any:
        """Run a coroutine with a client; its result."""

        async def main() -> Any:
            client = await EngineClient.connect(self.path, 60)
            try:
                async with asyncio.timeout(seconds):
                    return await scenario(client)
            finally:
                await client.close()

        return asyncio.run(main())

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
        self.runtime.remove()
