"""What `pagetide serve` runs under its supervisor: the processes' command lines, the held port, the loading bar."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from frontend.models import resolve_model, served_name
from frontend.supervisor import API, CORE, Spec, Supervisor
from protocol.config import EngineConfig, dump_config
from protocol.errors import StartupError

# -P: a folder called `protocol` or `frontend` where the user happens to be is not ours.
PYTHON = [sys.executable, "-P", "-m"]
API_KEY_VARIABLE = "PAGETIDE_API_KEY"
LOADING_SECONDS = (
    600.0  # how long an API server waits for a core that is loading; with a supervisor it never comes to that
)


@dataclass(frozen=True)
class ServeOptions:
    """How many of each process, and where the API listens. Port 0: a free one."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_servers: int = 1
    tokenizers: int = 1
    detokenizers: int = 1
    api_key: str = ""
    cors_origins: tuple[str, ...] = ()


def hold_port(host: str, port: int) -> socket.socket:
    """Reserve a port for API servers that share it: a bound socket that doesn't listen. Raises StartupError if taken.

    SO_REUSEPORT alone would let a second engine of the same user in unnoticed, so an exclusive bind goes first.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # What lingers of a server that has ended doesn't count as taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        held = socket.socket(family, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the port is out of range"
        raise StartupError(f"can't listen on {host}:{port}: {reason}; choose another with --port") from error
    return held


def url_of(host: str, port: int) -> str:
    """The address to type into a client on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


def answers_health(url: str) -> bool:
    """Whether an API server says that requests can be served. Takes a second at most."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def specs(directory: Path, config: EngineConfig, options: ServeOptions, port: int) -> list[Spec]:
    """The processes of an engine whose sockets live in `directory`; the core first."""
    metrics = directory / "metrics"
    metrics.mkdir()
    core = [*PYTHON, "engine_core", "serve", "--directory", str(directory), "--config", dump_config(config)]
    api = [*PYTHON, "frontend", "api", "--engine", str(directory), "--host", options.host, "--port", str(port)]
    api += ["--share-port", *(f"--cors-origin={origin}" for origin in options.cors_origins)]
    api += [f"--alias={alias}" for alias in config.model_aliases]
    api_environment = {"PROMETHEUS_MULTIPROC_DIR": str(metrics)}
    if options.api_key:
        api_environment[API_KEY_VARIABLE] = options.api_key  # not in the arguments, which every user can list
    tokenizer, detokenizer = (
        [*PYTHON, "frontend", name, "--engine", str(directory)] for name in ("tokenizer", "detokenizer")
    )
    return [
        Spec(CORE, core),
        *[Spec("tokenizer", tokenizer)] * options.tokenizers,
        *[Spec("detokenizer", detokenizer)] * options.detokenizers,
        *[Spec(API, api, api_environment)] * options.api_servers,
    ]


def resolve_config(config: EngineConfig) -> EngineConfig:
    """The configuration with MODEL's name made a path, pulled first if need be. Raises StartupError."""
    with Bar(f"downloading {config.model}") as bar:
        path = resolve_model(config.model, bar.update)
    name = config.name_for_clients(served_name(config.model))
    return msgspec.structs.replace(config, model=str(path), served_model_name=name)


def serve(config: EngineConfig, options: ServeOptions) -> int:
    """Serve until a signal; the exit code. Raises StartupError."""
    signal.signal(signal.SIGTERM, _interrupt)  # until the supervisor has its own handlers
    config = resolve_config(config)
    with hold_port(options.host, options.port) as held:
        port = held.getsockname()[1]
        url = url_of(options.host, port)
        return asyncio.run(_supervise(config, options, port, url))


async def _supervise(config: EngineConfig, options: ServeOptions, port: int, url: str) -> int:
    with Bar(f"loading {config.served_model_name}") as bar:
        supervisor = Supervisor(
            lambda directory: specs(directory, config, options, port),
            lambda: answers_health(url),
            f"pagetide serves {config.served_model_name} at {url}/v1",
            on_progress=bar.update,
            on_line=bar.write,
        )
        return await supervisor.run()


def serve_api(directory: Path, options: ServeOptions, aliases: tuple[str, ...], share_port: bool) -> int:
    """Be one API server of the engine in `directory`; the exit code."""
    from frontend.api.app import ApiConfig
    from frontend.api.server import serve as run_api
    from frontend.engine_client import EngineClient

    config = ApiConfig(
        host=options.host,
        port=options.port,
        reuse_port=share_port,
        api_key=options.api_key,
        cors_origins=options.cors_origins,
        aliases=aliases,
    )
    return run_api(config, lambda: EngineClient.connect(directory, LOADING_SECONDS))


def exec_core(config: EngineConfig) -> None:
    """Become the engine core: signals and exit code are its own from here. Its standard output is for a supervisor."""
    arguments = [*PYTHON, "engine_core", "serve", "--config", dump_config(resolve_config(config))]
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    os.execv(PYTHON[0], arguments)


def _interrupt(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


class Bar:
    """A progress bar on a terminal's standard error; nothing elsewhere. It goes away when it is full."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._progress: Any = None

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def update(self, done: int, total: int) -> None:
        """Show `done` of `total` bytes."""
        if done >= total:
            self._close()
            return
        if not sys.stderr.isatty():
            return
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
            )
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(self._title, total=total)
            self._progress.start()
        self._progress.update(self._task, completed=done, total=total)

    def write(self, line: str) -> None:
        """Write a line to standard error, above the bar."""
        if self._progress is None:
            with contextlib.suppress(BrokenPipeError):
                print(line, file=sys.stderr, flush=True)
        else:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
