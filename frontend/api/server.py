"""The API server process: its port, its signals, its end."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
import uvloop

from frontend.api.app import Api, ApiConfig
from frontend.engine_client import EngineClient
from protocol.errors import ErrorCode, PagetideError, StartupError
from protocol.lifeline import hold_lifeline

KEEP_ALIVE = 75  # seconds an idle connection stays open; longer than what proxies and client pools assume
UNREAD_SECONDS = 30  # how long the kernel keeps a connection whose client takes nothing in
LOST_GRACE = 1.0  # seconds for error events to go out when the engine core is gone

ClientFactory = Callable[[], Awaitable[EngineClient]]


def serve(config: ApiConfig, client_factory: ClientFactory) -> int:
    """Serve until a signal (0), or until the engine core is gone or can't be reached (1, one line says why)."""
    try:
        with listener(config) as sock:
            return uvloop.run(_serve(config, sock, client_factory))
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def listener(config: ApiConfig) -> socket.socket:
    """Return the bound socket, not listening yet. Raises StartupError if the port is taken.

    With `reuse_port` other API servers may have it as well, and the kernel deals connections out between them.
    """
    if not 0 <= config.port < 1 << 16:  # getaddrinfo takes it modulo that
        raise _taken(config, ValueError("there is no such port"))
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _taken(config, error) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if config.reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections inherit this. A client that stops reading would otherwise hold its connection for ever: the
        # engine drops the generation, but a write that waits for the client never learns of it.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _taken(config, error) from error
    return sock


def _taken(config: ApiConfig, error: Exception) -> StartupError:
    reason = getattr(error, "strerror", None) or str(error)
    return StartupError(f"can't listen on {config.host}:{config.port}: {reason}; choose another with --port")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours are in place before it starts."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(config: ApiConfig, sock: socket.socket, client_factory: ClientFactory) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    hold_lifeline()
    stopping = loop.create_task(stop.wait())
    connecting = asyncio.ensure_future(client_factory())
    await asyncio.wait({stopping, connecting}, return_when=asyncio.FIRST_COMPLETED)
    if not connecting.done():
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await connecting
        return 0
    client = await connecting
    lost = loop.create_task(client.lost.wait())
    try:
        return await _run(config, sock, client, stopping, lost)
    finally:
        lost.cancel()
        stopping.cancel()
        await client.close()


async def _run(
    config: ApiConfig,
    sock: socket.socket,
    client: EngineClient,
    stopping: "asyncio.Task[object]",
    lost: "asyncio.Task[object]",
) -> int:
    """Serve until one of the tasks is done; the exit code."""
    api = Api(config, client)
    server = _Server(
        uvicorn.Config(
            api.app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(config.grace + 1),
        )
    )
    serving = asyncio.create_task(server.serve([sock]))
    await asyncio.wait({serving, stopping, lost}, return_when=asyncio.FIRST_COMPLETED)
    is_lost = lost.done()
    if is_lost:
        grace, error = LOST_GRACE, PagetideError(ErrorCode.ENGINE_UNAVAILABLE, "the engine core is gone")
    else:
        grace, error = config.grace, PagetideError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
    server.config.timeout_graceful_shutdown = int(grace + 1)
    server.should_exit = True
    timer = asyncio.get_running_loop().call_later(grace, api.interrupt, error)
    try:
        await serving
    except OSError as reason:  # two that bind at the same moment learn of each other only when they listen
        raise _taken(config, reason) from reason
    finally:
        timer.cancel()
    if is_lost:
        print("error: the engine core is gone", file=sys.stderr)
    return 1 if is_lost else 0
