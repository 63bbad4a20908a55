"""How many streamed tokens a second one API server passes on, beside a bare starlette SSE loop that sends equal bytes.

`pagetide` and `starlette` play the engine: each stream gets a one-token delta whenever it takes one. `engine` has real
processes behind the API server, a core without a model and a detokenizer; there, deltas of a stream may be merged into
one event, so tokens are taken from the core's own count. The server's CPU time per token tells what it would do with a
core of its own; all processes share this machine's cores.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from frontend.api.app import Api, ApiConfig
from frontend.engine_client import EngineClient
from frontend.models import DEFAULT_MODEL, local_path
from protocol.config import EngineConfig
from protocol.messages import Finish, ModelInfo, TextDelta
from tools.local_engine import ROOT, LocalEngine

TEXT = " word"
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","created":1700000000,"model":"null",'
    b'"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True, "ignore_eos": True}).encode()
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


class PlayedEngine:
    """Has the parts of EngineClient that a stream needs, and is its own Generation."""

    model = ModelInfo("null", "", 1000, 1 << 20, 1700000000, [])
    status = None
    prompt_tokens = 1

    def health(self) -> None:
        return None

    def generate(self, *_: Any, **__: Any) -> "PlayedEngine":
        return self

    async def __aenter__(self) -> "PlayedEngine":
        return self

    async def __aexit__(self, *_: Any) -> None:
        return None

    async def __aiter__(self) -> AsyncIterator[tuple[int, TextDelta]]:
        while True:
            await asyncio.sleep(0)
            yield 0, TextDelta(0, TEXT, 1, Finish.NONE)


def pagetide_app() -> Any:
    return Api(ApiConfig(), PlayedEngine()).app  # type: ignore[arg-type]


def starlette_app() -> Any:
    async def events() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield EVENT

    async def chat(request: Request) -> StreamingResponse:
        await request.json()
        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


def serve(make_app: Callable[[], Any], sock: socket.socket) -> None:
    config = uvicorn.Config(
        make_app(), loop="none", http="httptools", ws="none", lifespan="off", log_config=None, access_log=False
    )
    uvloop.run(uvicorn.Server(config).serve([sock]))


class Reader(asyncio.Protocol):
    """Sends a request and counts the events that come back."""

    events = 0  # of all readers together

    def connection_made(self, transport: Any) -> None:
        transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        Reader.events += data.count(b"data: ")


async def read(address: tuple[str, int], streams: int, seconds: float, server: psutil.Process) -> dict[str, float]:
    """Events per second over a window after a second of warm-up, and the server's CPU time per event."""
    loop = asyncio.get_running_loop()
    transports = [(await loop.create_connection(Reader, *address))[0] for _ in range(streams)]
    await asyncio.sleep(1.0)
    events, started, cpu = Reader.events, time.monotonic(), sum(server.cpu_times()[:2])
    await asyncio.sleep(seconds)
    events, elapsed, cpu = Reader.events - events, time.monotonic() - started, sum(server.cpu_times()[:2]) - cpu
    for transport in transports:
        transport.abort()
    return {
        "tokens_per_second": round(events / elapsed),
        "cpu_us_per_token": round(cpu / events * 1e6, 1),
        "cpu_share": round(cpu / elapsed, 2),
    }


def measure(make_app: Callable[[], Any], streams: int, seconds: float) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(make_app, sock), daemon=True)
        process.start()
        try:
            return uvloop.run(read(sock.getsockname(), streams, seconds, psutil.Process(process.pid)))
        finally:
            process.kill()
            process.join()


def measure_engine(streams: int, seconds: float) -> dict[str, float]:
    """The same load on `pagetide api` with an engine behind it that has no model."""
    config = EngineConfig(model=str(local_path(DEFAULT_MODEL)), device="null", num_blocks=1 << 17, max_running=256)
    with tempfile.TemporaryDirectory(prefix="pt-") as directory, socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
        free.close()
        engine = LocalEngine(Path(directory), config)
        command = [sys.executable, "-m", "frontend", "api", "--engine", str(engine.path), "--port", str(address[1])]
        server = subprocess.Popen(command, cwd=ROOT)
        try:
            wait_for(address)
            return engine.run(lambda client: read_engine(client, address, streams, seconds, psutil.Process(server.pid)))
        finally:
            server.terminate()
            server.wait()
            engine.stop()


async def read_engine(
    client: EngineClient, address: tuple[str, int], streams: int, seconds: float, server: psutil.Process
) -> dict[str, float]:
    """Like `read`, with tokens by the core's own count."""

    def tokens() -> tuple[float, float]:
        assert client.status is not None
        return client.status.counters["generated_tokens_total"], client.status.time

    loop = asyncio.get_running_loop()
    transports = [(await loop.create_connection(Reader, *address))[0] for _ in range(streams)]
    await asyncio.sleep(1.0)
    (count, started), events, cpu = tokens(), Reader.events, sum(server.cpu_times()[:2])
    await asyncio.sleep(seconds)
    (last_count, ended), cpu = tokens(), sum(server.cpu_times()[:2]) - cpu
    events = Reader.events - events
    for transport in transports:
        transport.abort()
    return {
        "tokens_per_second": round((last_count - count) / (ended - started)),
        "events_per_second": round(events / seconds),
        "cpu_us_per_token": round(cpu / (last_count - count) * 1e6, 1),
        "cpu_share": round(cpu / seconds, 2),
    }


def wait_for(address: tuple[str, int]) -> None:
    """Until somebody listens there."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address, 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit("the API server did not come up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=2, help="alternate between the two this often; the best counts")
    parser.add_argument("--output", help="write the figures as JSON")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for _ in range(options.rounds):
        for name, make_app in (("pagetide", pagetide_app), ("starlette", starlette_app)):
            result = measure(make_app, options.streams, options.seconds)
            results[name] = max(result, results.get(name, result), key=lambda one: one["tokens_per_second"])
    results["engine"] = measure_engine(options.streams, options.seconds)
    ratio = results["pagetide"]["tokens_per_second"] / results["starlette"]["tokens_per_second"]
    report = {"streams": options.streams, "cores": os.cpu_count(), "python": platform.python_version()}
    figures = json.dumps(report | results | {"ratio": round(ratio, 2), "goal": 8000})
    print(figures)
    if options.output:
        Path(options.output).write_text(figures)
    print(f"{'':12}{'tokens/s':>12}{'CPU us/token':>16}{'CPU share':>12}")
    for name, result in results.items():
        print(f"{name:12}{result['tokens_per_second']:>12,}{result['cpu_us_per_token']:>16}{result['cpu_share']:>12}")
    print(f"{'goal':12}{8000:>12,}")


if __name__ == "__main__":
    main()
