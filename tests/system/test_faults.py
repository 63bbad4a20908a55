"""Processes die, stop, and come back; nothing leaks and the others go on. The engine runs no model: it is quick."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from frontend.engine_client import EngineClient
from frontend.generation import Generation
from protocol.errors import ErrorCode, PagetideError
from protocol.messages import Finish, SamplingParams, TextDelta, TextParams, TextPrompt
from tools.local_engine import ROOT, LocalEngine

from .conftest import is_idle, status_where

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)


@pytest.fixture
def engine(start: Callable[..., LocalEngine], default_model: Path) -> LocalEngine:
    """No model: quick."""
    return start(model=str(default_model), device="null", num_blocks=4096, max_running=256)


@pytest.fixture
def busy_engine(start: Callable[..., LocalEngine], default_model: Path) -> LocalEngine:
    """A real model, so that a stream of ENDLESS length is still running whenever something is killed."""
    return start(model=str(default_model), num_blocks=4096, max_running=256)


def stream(client: EngineClient, sampling: SamplingParams = ENDLESS) -> Generation:
    return client.generate(TextPrompt("Once upon a time"), sampling, TextParams())


async def read_to_error(items: AsyncIterator[tuple[int, TextDelta]]) -> ErrorCode:
    """Read a stream until its error; the code."""
    try:
        async for _, delta in items:
            if delta.finish is Finish.ERROR:
                assert delta.error_code is not None
                return delta.error_code
    except PagetideError as error:
        return error.code
    raise AssertionError("the stream ended well")


async def count_tokens(client: EngineClient, sampling: SamplingParams) -> int:
    async with stream(client, sampling) as generation:
        return sum([delta.tokens async for _, delta in generation])


def test_killed_services_fail_their_requests_and_new_ones_are_found(busy_engine: LocalEngine) -> None:
    async def scenario(client: EngineClient) -> None:
        async with stream(client) as generation:
            items = aiter(generation)
            await anext(items)
            busy_engine.detokenizers[0].kill()
            assert await read_to_error(items) is ErrorCode.ENGINE_UNAVAILABLE
        await status_where(client, is_idle)
        busy_engine.tokenizers[0].kill()
        while client.health() is None:
            await asyncio.sleep(0.02)
        with pytest.raises(PagetideError):
            await count_tokens(client, ENDLESS)
        busy_engine.add("tokenizer")
        busy_engine.add("detokenizer")
        while client.health() is not None:
            await asyncio.sleep(0.02)
        assert await count_tokens(client, SamplingParams(max_tokens=20, ignore_eos=True)) == 20

    busy_engine.run(scenario)


def test_a_killed_core_ends_every_stream_and_every_process_within_two_seconds(busy_engine: LocalEngine) -> None:
    async def scenario(client: EngineClient) -> None:
        async with stream(client) as generation:
            items = aiter(generation)
            await anext(items)
            busy_engine.core.kill()
            killed = time.monotonic()
            assert await read_to_error(items) is ErrorCode.ENGINE_UNAVAILABLE
            await client.lost.wait()
            assert time.monotonic() - killed < 2.0

    busy_engine.run(scenario)
    assert busy_engine.tokenizers[0].wait(2) == 1
    assert busy_engine.detokenizers[0].wait(2) == 1


def test_a_stopped_core_is_unhealthy_and_goes_on_where_it_was(engine: LocalEngine) -> None:
    async def scenario(client: EngineClient) -> None:
        async with stream(client, SamplingParams(max_tokens=3000, ignore_eos=True)) as generation:
            os.kill(engine.core.pid, signal.SIGSTOP)
            while client.health() is None:
                await asyncio.sleep(0.02)
            assert client.health() == "the engine core gives no sign of life"
            os.kill(engine.core.pid, signal.SIGCONT)
            assert sum([delta.tokens async for _, delta in generation]) == 3000
            while client.health() is not None:
                await asyncio.sleep(0.02)

    engine.run(scenario)


FRONTEND = """
import asyncio, sys
from pathlib import Path
from frontend.engine_client import EngineClient
from protocol.messages import SamplingParams, TextParams, TextPrompt

async def main():
    client = await EngineClient.connect(Path(sys.argv[1]))
    streams = [client.generate(TextPrompt("Hello"), SamplingParams(max_tokens=4000, ignore_eos=True), TextParams())
               for _ in range(200)]
    await asyncio.gather(*(stream.__aenter__() for stream in streams))
    print("running", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_200_streams_of_a_killed_frontend_leave_nothing_behind(busy_engine: LocalEngine) -> None:
    async def scenario(client: EngineClient) -> None:
        frontend = subprocess.Popen(
            [sys.executable, "-c", FRONTEND, str(busy_engine.path)], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert frontend.stdout is not None
        await asyncio.to_thread(frontend.stdout.readline)
        running = await status_where(client, lambda s: s.running > 100)
        assert len([peer for peer in running.peers if peer.role == 3]) == 2
        frontend.kill()
        frontend.wait()
        frontend.stdout.close()
        status = await status_where(client, is_idle)
        assert status.counters["requests_aborted_total"] >= 1
        status = await status_where(client, lambda s: len([peer for peer in s.peers if peer.role == 3]) == 1)
        assert await count_tokens(client, SamplingParams(max_tokens=20, ignore_eos=True)) == 20

    busy_engine.run(scenario)


def test_a_stopped_frontend_loses_nothing_and_disturbs_nobody(engine: LocalEngine) -> None:
    """SIGSTOP for a while, then SIGCONT: its streams go on where they were (failure report J4)."""
    code = """
import asyncio, sys
from pathlib import Path
from frontend.engine_client import EngineClient
from protocol.messages import SamplingParams, TextParams, TextPrompt

async def one(client):
    sampling = SamplingParams(max_tokens=8000, ignore_eos=True)
    async with client.generate(TextPrompt("Hello"), sampling, TextParams()) as generation:
        return sum([delta.tokens async for _, delta in generation])

async def main():
    client = await EngineClient.connect(Path(sys.argv[1]))
    print("running", flush=True)
    counts = await asyncio.gather(*(one(client) for _ in range(40)))
    gaps = sum(link.sequence_gaps for link in client._detokenizers.values())
    print(set(counts), gaps, flush=True)
    await client.close()

asyncio.run(main())
"""

    async def scenario(client: EngineClient) -> None:
        other = subprocess.Popen([sys.executable, "-c", code, str(engine.path)], cwd=ROOT, stdout=subprocess.PIPE)
        assert other.stdout is not None
        await asyncio.to_thread(other.stdout.readline)
        await status_where(client, lambda s: s.running > 0)
        os.kill(other.pid, signal.SIGSTOP)
        started = time.monotonic()
        assert await count_tokens(client, SamplingParams(max_tokens=500, ignore_eos=True)) == 500
        assert time.monotonic() - started < 20
        os.kill(other.pid, signal.SIGCONT)
        line = await asyncio.to_thread(other.stdout.readline)
        assert line.decode().strip() == "{8000} 0"
        other.wait()
        other.stdout.close()

    engine.run(scenario)


def test_abandoned_and_finished_streams_leave_no_entries(engine: LocalEngine) -> None:
    async def scenario(client: EngineClient) -> None:
        async def abandon() -> None:
            async with stream(client) as generation:
                await anext(aiter(generation))

        await asyncio.gather(*(abandon() for _ in range(200)))
        await asyncio.gather(*(count_tokens(client, SamplingParams(max_tokens=3)) for _ in range(50)))
        await status_where(client, is_idle)
        assert not client._generations

    engine.run(scenario)


def test_over_long_requests_leave_nothing(engine: LocalEngine) -> None:
    async def scenario(client: EngineClient) -> None:
        prompt = TextPrompt("word " * 10_000)
        for _ in range(20):
            with pytest.raises(PagetideError) as caught:
                async with client.generate(prompt, SamplingParams(), TextParams(), choices=4):
                    pass
            assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        status = await status_where(client, is_idle)
        assert status.counters["requests_accepted_total"] == 0
        assert not client._generations

    engine.run(scenario)


def test_sigterm_of_the_core_ends_streams_with_an_error_and_leaves_no_socket(busy_engine: LocalEngine) -> None:
    async def scenario(client: EngineClient) -> None:
        async with stream(client) as generation:
            items = aiter(generation)
            await anext(items)
            busy_engine.core.terminate()
            assert await read_to_error(items) in (ErrorCode.SHUTTING_DOWN, ErrorCode.ENGINE_UNAVAILABLE)

    busy_engine.run(scenario)
    assert busy_engine.core.wait(5) == 0
    for process in (*busy_engine.tokenizers, *busy_engine.detokenizers):
        assert process.wait(3) == 1
    assert [path.name for path in busy_engine.path.iterdir()] == ["lock"]
