"""The command line over real processes. The engine runs no model (`--device null`): its answers are noise, soon."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from frontend.launch import answers_health

from .serving import NULL, PAGETIDE, ROOT, Serve, environment_in

pytestmark = pytest.mark.model


@pytest.fixture
def environment(short_path: Path) -> dict[str, str]:
    """A runtime directory of the test's own."""
    return environment_in(short_path)


@pytest.fixture
def serve(environment: dict[str, str], default_model: Path) -> Iterator[Serve]:
    running = Serve(environment, default_model, "--api-servers", "2", "--served-model-name", "noise")
    yield running
    if running.process.poll() is None:
        running.stop()


def test_a_day_in_the_life(serve: Serve) -> None:
    assert serve.complete().json()["usage"]["completion_tokens"] == 5

    generated = serve.run("generate", "hello", "--max-tokens", "4", "--ignore-eos", "--seed", "5", "--json")
    answer = json.loads(generated.stdout)
    assert (answer["model"], answer["completion_tokens"], answer["finish_reason"], answer["seed"]) == (
        "noise",
        4,
        "length",
        5,
    )
    raw = serve.run("generate", "-", "--raw", "--max-tokens", "4", "--ignore-eos", stdin="once upon")
    assert raw.returncode == 0
    assert raw.stdout.endswith("\n")
    refused = serve.run("generate", "hello", "--temperature", "-1")
    assert (refused.returncode, refused.stderr) == (1, "error: temperature must be from 0 to 100, not -1.0\n")

    talked = serve.run("chat", "--max-tokens", "3", stdin="hello\n/reset\n/help\n\n/exit\n")
    assert talked.returncode == 0
    assert talked.stdout.endswith("(forgotten)\n(there are /reset and /exit)\n")

    status = json.loads(serve.run("status", "--json").stdout)
    assert status["model"]["name"] == "noise"
    ours = {child.pid for child in psutil.Process(serve.process.pid).children()}
    assert sorted(peer["role"] for peer in status["peers"] if peer["pid"] in ours) == [
        "detokenizer",
        "frontend",
        "frontend",
        "tokenizer",
    ]
    assert "noise - up" in serve.run("status").stdout
    code, errors = serve.stop()
    assert (code, "Traceback" in errors) == (0, False)


def test_killed_processes_are_replaced(serve: Serve) -> None:
    for role in ("api", "tokenizer", "detokenizer"):
        victims = serve.children(role)
        for victim in victims:
            victim.kill()
        deadline = time.monotonic() + 20
        while len(new := serve.children(role)) < len(victims) or set(new) & set(victims):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        serve.wait_healthy()
        assert serve.complete().status_code == 200, role


def test_the_death_of_the_core_ends_everything(serve: Serve) -> None:
    family = psutil.Process(serve.process.pid).children()
    killed = time.monotonic()
    serve.children("engine_core")[0].kill()
    _, errors = serve.process.communicate(timeout=10)
    assert time.monotonic() - killed < 2.5
    assert serve.process.returncode == 1
    assert errors.splitlines()[-1] == "error: the engine core was killed by SIGKILL"
    assert not [member for member in family if member.is_running()]


def test_an_api_server_is_attached_and_detached(serve: Serve) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [*PAGETIDE, "api", "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, env=serve.environment) as attached:
        deadline = time.monotonic() + 20
        while not answers_health(url):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert serve.complete(url).status_code == 200
        attached.terminate()
        assert attached.wait(10) == 0
    assert serve.complete().status_code == 200


def test_the_engine_ends_with_its_supervisor(serve: Serve) -> None:
    family = psutil.Process(serve.process.pid).children()
    serve.process.kill()
    serve.process.communicate(timeout=10)
    assert not psutil.wait_procs(family, timeout=8)[1]
    again = serve.run("status")
    assert again.returncode == 1
    assert again.stderr == "error: no engine is running; start one with `pagetide serve`\n"


def test_two_engines_at_once(serve: Serve, default_model: Path) -> None:
    other = Serve(serve.environment, default_model, "--served-model-name", "other")
    assert other.complete().status_code == serve.complete().status_code == 200
    assert json.loads(serve.run("status", "--json").stdout)["model"]["name"] == "other"  # the newest
    named = serve.run("status", "--json", "--engine", str(serve.directory))
    assert json.loads(named.stdout)["model"]["name"] == "noise"
    assert other.stop(signal.SIGINT)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_moment_of_the_start(
    environment: dict[str, str], default_model: Path, number: signal.Signals
) -> None:
    for moment in (0.15, 0.3, 0.5, 0.8, 1.2):
        starting = Serve(environment, default_model, wait=False)
        wait_for_child(starting)
        time.sleep(moment)  # the moment is what is tested
        code, errors = starting.stop(number)
        assert code == 0, errors
        assert "Traceback" not in errors


@pytest.mark.parametrize("moment", [0.0, 0.4, 1.2])
def test_nothing_outlives_a_supervisor_that_is_killed_while_starting(
    environment: dict[str, str], default_model: Path, moment: float
) -> None:
    """Failure report I1: before the core loads its model, and while it does."""

    def left() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if environment["XDG_RUNTIME_DIR"] in " ".join(process.cmdline()):
                    found.append(process)
        return found

    starting = Serve(environment, default_model, wait=False, device=["--device", "cpu"])
    wait_for_child(starting)
    time.sleep(moment)  # the moment is what is tested
    assert left()
    starting.process.kill()
    starting.process.communicate(timeout=10)
    deadline = time.monotonic() + 8
    while left():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_child(serve: Serve) -> None:
    """Until it has started something, or nothing could be left."""
    deadline = time.monotonic() + 10
    while not psutil.Process(serve.process.pid).children():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def failed_start(environment: dict[str, str], *arguments: str) -> str:
    """The last line of a `pagetide serve` that must not start."""
    started = time.monotonic()
    command = [*PAGETIDE, "serve", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1, done.stderr
    assert time.monotonic() - started < 15
    base = Path(environment["XDG_RUNTIME_DIR"]) / "pagetide"
    assert not list(base.glob("*"))
    return done.stderr.splitlines()[-1]


def test_starts_that_fail_say_why_in_the_last_line(
    environment: dict[str, str], default_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(40))
    model = str(default_model)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port}: Address already in use" in failed_start(environment, model, *NULL, "--port", port)
    free = ("--port", "0")
    assert "there is no model 'nothing'" in failed_start(environment, "nothing", *free)
    assert "--block-size 0 is out of range" in failed_start(environment, model, *free, "--block-size", "0")
    assert str(broken) in failed_start(environment, str(broken), *free)
    assert "--num-blocks is too low" in failed_start(environment, model, *free, "--num-blocks", "3")
    long = environment | {"XDG_RUNTIME_DIR": str(tmp_path / ("x" * 100))}
    Path(long["XDG_RUNTIME_DIR"]).mkdir()
    assert "is too long" in failed_start(long, model, *free, *NULL)


def test_the_demo(environment: dict[str, str], default_model: Path) -> None:
    command = [sys.executable, "-m", "tools.demo"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished after") == 5
    assert "Rome" in done.stdout
    assert "ended with code 0" in done.stdout
