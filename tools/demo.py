"""`make demo`: one engine, two API servers and the CLI on the default model, all asked at once."""

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel

from frontend.launch import PYTHON, answers_health, hold_port
from frontend.models import DEFAULT_MODEL
from frontend.status_view import StatusReader, status_view
from protocol.errors import StartupError
from protocol.lifeline import Lifeline
from protocol.runtime_dir import running_engines

START_SECONDS = 120.0
MAX_TOKENS = 60
PAGETIDE = [*PYTHON, "frontend"]


@dataclass
class Question:
    """A prompt on its way through one frontend, and what has come of it."""

    frontend: str
    prompt: str
    url: str = ""  # "": through the CLI
    text: str = ""
    end: str = ""

    def panel(self) -> Panel:
        """How it looks on the terminal."""
        return Panel(self.text.strip(), title=f"{self.frontend}: {self.prompt}", title_align="left", subtitle=self.end)


def run_demo() -> int:
    """Run it; the exit code, 0 if every question got an answer. Raises StartupError."""
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console()
    _show_command(console, f"pagetide serve {DEFAULT_MODEL}")
    with contextlib.ExitStack() as processes:
        lifeline = Lifeline()
        serve = processes.enter_context(
            _process(["serve", DEFAULT_MODEL, "--port", "0", "--max-cache", "2048"], lifeline)
        )
        first_url = _ready_url(serve, console)
        directory = next(path for path in running_engines() if path.name.startswith(f"{serve.pid}-"))
        _show_command(console, "pagetide api")
        with hold_port("127.0.0.1", 0) as held:
            port = str(held.getsockname()[1])
            processes.enter_context(
                _process(["api", "--engine", str(directory), "--port", port, "--share-port"], lifeline)
            )
            second_url = f"http://127.0.0.1:{port}"
            _wait_for(lambda: answers_health(second_url), "the second API server")
        console.print(f"a second API server is attached at {second_url}/v1")
        questions = [
            Question("API server 1", "Why is the sea salty?", first_url),
            Question("API server 2", "Write two lines about the tide.", second_url),
            Question("API server 1", "Name three fruits.", first_url),
            Question("API server 2", "What is a page table?", second_url),
            Question("pagetide generate", "Name the capital city of Italy."),
        ]
        _show_command(console, "curl .../v1/chat/completions (4 times) and pagetide generate, all at once")
        seconds = _ask_all(questions, directory, console)
        console.print(f"{len(questions)} answers in {seconds:.1f} s")
        _show_command(console, "pagetide status")
        with StatusReader(directory) as reader:
            console.print(status_view(reader.read()))
        _show_command(console, "Ctrl-C")
        failed = [question for question in questions if not question.end.startswith("finished")]
    code = serve.returncode
    leftover = directory.exists()
    console.print(
        f"all stopped: `pagetide serve` ended with code {code}" + (f", {directory} is left" if leftover else "")
    )
    return 1 if failed or code or leftover else 0


def _show_command(console: Console, command: str) -> None:
    console.print(f"\n$ {command}", style="bold")


@contextlib.contextmanager
def _process(arguments: list[str], lifeline: Lifeline) -> "Iterator[subprocess.Popen[str]]":
    """Run `pagetide` with these arguments until the block ends, then stop it politely."""
    process = subprocess.Popen(
        [*PAGETIDE, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **lifeline.environment},
        pass_fds=[lifeline.read_end],
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready_url(serve: "subprocess.Popen[str]", console: Console) -> str:
    assert serve.stdout is not None
    watchdog = threading.Timer(START_SECONDS, serve.terminate)
    watchdog.start()
    line = serve.stdout.readline().strip()
    watchdog.cancel()
    if not line:
        raise StartupError("`pagetide serve` did not start")  # its own last line says why
    console.print(line)
    return line.split()[-1].removesuffix("/v1")


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise StartupError(f"{what} did not start")
        time.sleep(0.05)


def _ask_all(questions: list[Question], directory: Path, console: Console) -> float:
    """Ask everything at once and show the answers grow, or print them at the end without a terminal; seconds taken."""
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(questions)) as pool:
        running = [pool.submit(_ask, question, directory) for question in questions]
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                while concurrent.futures.wait(running, timeout=0.1).not_done:
                    live.update(Group(*(question.panel() for question in questions)), refresh=True)
                live.update(Group(*(question.panel() for question in questions)), refresh=True)
        else:
            for question, _ in zip(questions, map(concurrent.futures.Future.result, running), strict=True):
                console.print(question.panel())
        for future in running:
            future.result()
    return time.monotonic() - started


def _ask(question: Question, directory: Path) -> None:
    started = time.monotonic()
    try:
        for piece in _over_http(question) if question.url else _over_cli(question, directory):
            question.text += piece
        question.end = f"finished after {time.monotonic() - started:.1f} s"
    except (OSError, StartupError) as error:
        question.end = f"failed: {error}"


def _over_http(question: Question) -> Iterator[str]:
    import json

    import httpx

    body = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": question.prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    client = httpx.Client(trust_env=False, timeout=60)
    try:
        with client, client.stream("POST", f"{question.url}/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise StartupError(f"HTTP {answer.status_code}: {answer.read().decode()}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise StartupError(event["error"]["message"])
                    for choice in event["choices"]:
                        yield choice["delta"].get("content") or ""
    except httpx.HTTPError as error:
        raise StartupError(str(error)) from error


def _over_cli(question: Question, directory: Path) -> Iterator[str]:
    options = ["--engine", str(directory), "--temperature", "0", "--max-tokens", str(MAX_TOKENS)]
    with subprocess.Popen([*PAGETIDE, "generate", question.prompt, *options], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 4096):
            yield piece.decode(errors="replace")
    if process.returncode:
        raise StartupError(f"`pagetide generate` ended with code {process.returncode}")


def _interrupt(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    try:
        sys.exit(run_demo())
    except StartupError as error:
        sys.exit(f"error: {error}")
