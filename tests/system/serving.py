"""A `pagetide serve` for tests."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

from frontend.launch import answers_health
from protocol.runtime_dir import running_engines

ROOT = Path(__file__).parents[2]
PAGETIDE = [sys.executable, "-m", "frontend"]
NULL = ["--device", "null", "--max-cache", "2048"]


def environment_in(path: Path) -> dict[str, str]:
    """With a runtime directory of the test's own."""
    return {**os.environ, "XDG_RUNTIME_DIR": str(path), "NO_COLOR": "1"}


class Serve:
    """A running `pagetide serve`."""

    def __init__(
        self, environment: dict[str, str], model: Path, *options: str, wait: bool = True, device: list[str] = NULL
    ) -> None:
        self.environment = environment
        self.base = Path(environment["XDG_RUNTIME_DIR"]) / "pagetide"
        command = [*PAGETIDE, "serve", str(model), "--port", "0", *device, *options]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)
        self.url = self.wait_ready() if wait else ""

    def wait_ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("pagetide serves "), self.process.communicate()[1]
        return line.split()[-1].removesuffix("/v1")

    @property
    def directory(self) -> Path:
        return next(path for path in running_engines(self.base) if path.name.startswith(f"{self.process.pid}-"))

    def children(self, role: str) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if role in child.cmdline()[:5]:
                    found.append(child)
        return found

    def complete(self, url: str = "") -> httpx.Response:
        body = {"model": "smollm2-135m", "prompt": "hi", "max_tokens": 5, "ignore_eos": True}
        body["model"] = httpx.get(f"{url or self.url}/v1/models").json()["data"][0]["id"]
        return httpx.post(f"{url or self.url}/v1/completions", json=body, timeout=20)

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + 20
        while not answers_health(self.url):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def run(self, *arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*PAGETIDE, *arguments],
            cwd=ROOT,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """End it; its exit code and standard error. Nothing may be left."""
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=20)
        assert not [member for member in family if member.is_running()]
        assert not [path for path in self.base.glob("*") if path.name.startswith(f"{self.process.pid}-")]
        return self.process.returncode, errors
