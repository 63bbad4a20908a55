"""Swapping through the real processes: the same tokens as without, and nothing left behind whoever ends what when."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from frontend.engine_client import EngineClient
from protocol.messages import Finish, SamplingParams, TextParams, TokenPrompt, pack_i32
from protocol.status import CoreStatus
from tools.local_engine import ROOT, LocalEngine
from tools.streams import Stream, random_prompts, run_stream

from .conftest import is_idle, status_where

pytestmark = [pytest.mark.model, pytest.mark.timeout(200)]

# One thread: where others want the cores, two of a step's wait for each other most of the time.
STORM = {"block_size": 4, "prefix_cache": False, "max_cache": 256, "max_running": 32, "threads": 1}


def is_clean(status: CoreStatus) -> bool:
    """Nothing runs, is swapped or is being copied; without a prefix cache both pools are empty."""
    gauges = status.gauges
    return (
        is_idle(status)
        and gauges["swapped_requests"] == 0
        and gauges["kv_blocks_copying"] == 0
        and gauges["kv_blocks_free"] == gauges["kv_blocks_total"]
        and gauges["kv_host_blocks_used"] == 0
        and gauges["kv_host_blocks_total"] > 0
    )


def make_streams(count: int, tokens: int = 16) -> list[Stream]:
    lengths = [9 + 11 * number % 60 for number in range(count)]
    return [Stream(prompt, tokens) for prompt in random_prompts(7, lengths)]


async def run_all(client: EngineClient, streams: list[Stream]) -> list[Stream]:
    return list(await asyncio.gather(*(run_stream(client, stream, with_ids=True) for stream in streams)))


@pytest.mark.parametrize("name", ["auto", "int8"])
def test_forced_swaps_change_no_token(start: Callable[..., LocalEngine], default_model: Path, name: str) -> None:
    """SmolLM2 in FP32, a swap at every step and at every third."""
    options = {"model": str(default_model), "dtype": "fp32", "weights": "dense", "kv_cache_dtype": name}

    def run(**changes: int) -> tuple[list[Stream], CoreStatus]:
        async def scenario(client: EngineClient) -> tuple[list[Stream], CoreStatus]:
            return await run_all(client, make_streams(6)), await status_where(client, is_clean)

        engine = start(**options | STORM | changes)
        found: tuple[list[Stream], CoreStatus] = engine.run(scenario, 100)
        engine.stop()
        return found

    calm, status = run()
    assert status.counters["requests_preempted_total"] == 0
    for every in (1, 3) if name == "auto" else (2,):
        streams, status = run(swap_every=every, num_blocks=96)
        assert status.counters["requests_swapped_total"] == status.counters["requests_resumed_total"] >= 12 // every
        assert status.counters["requests_recomputed_total"] == 0
        assert sum(stream.timing.swaps for stream in streams if stream.timing) >= 12 // every
        assert [stream.tokens for stream in streams] == [stream.tokens for stream in calm]


@pytest.fixture
def storm(start: Callable[..., LocalEngine], default_model: Path) -> LocalEngine:
    """No model; a swap at every step in a pool that holds a fourth of what comes."""
    return start(model=str(default_model), device="null", num_blocks=160, swap_every=1, max_pause=0.01, **STORM)


def test_stop_strings_and_disconnects_while_swapped_leave_nothing(storm: LocalEngine) -> None:
    async def scenario(client: EngineClient) -> None:
        probe = await run_stream(client, Stream([5, 6, 7], 80))
        stop = probe.text[60:64]
        assert stop
        sampling = SamplingParams(max_tokens=200, ignore_eos=True)

        async def one(number: int, prompt: list[int]) -> Finish | None:
            text = TextParams(stop=[stop]) if number % 2 else TextParams()
            seen = 0
            async with client.generate(TokenPrompt(pack_i32(prompt)), sampling, text) as generation:
                async for _, delta in generation:
                    seen += delta.tokens
                    if delta.finish:
                        return delta.finish
                    if number % 4 == 0 and seen > number:
                        return None  # leaves in the middle
            raise AssertionError("no end")

        prompts = random_prompts(1, [4 + number % 40 for number in range(60)])
        ends = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
        assert ends == [Finish.STOP if n % 2 else Finish.LENGTH if n % 4 else None for n in range(60)]
        status = await status_where(client, is_clean)
        assert status.counters["requests_swapped_total"] > 60
        assert not client._generations

    storm.run(scenario)


FRONTEND = """
import asyncio, sys
from pathlib import Path
from frontend.engine_client import EngineClient
from tools.streams import Stream, random_prompts, run_stream

async def main():
    client = await EngineClient.connect(Path(sys.argv[1]))
    streams = [Stream(prompt, 200) for prompt in random_prompts(2, [40] * 60)]
    tasks = [asyncio.create_task(run_stream(client, stream)) for stream in streams]
    await asyncio.gather(*(stream.has_begun.wait() for stream in streams[:8]))
    print("running", flush=True)
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


def test_a_killed_frontend_whose_requests_are_in_every_state_leaves_nothing(storm: LocalEngine) -> None:
    """While another frontend's go on."""

    async def scenario(client: EngineClient) -> None:
        for _ in range(3):
            command = [sys.executable, "-c", FRONTEND, str(storm.path)]
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as frontend:
                assert frontend.stdout is not None
                await asyncio.to_thread(frontend.stdout.readline)
                ours = asyncio.create_task(run_all(client, make_streams(4, tokens=150)))
                await status_where(client, lambda status: status.gauges["swapped_requests"] > 0)
                frontend.kill()
                assert all(stream.is_complete for stream in await ours)
            status = await status_where(client, is_clean)
            assert status.counters["requests_aborted_total"] > 0

    storm.run(scenario)


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_an_end_of_the_core_in_a_swap_storm_ends_every_stream(
    start: Callable[..., LocalEngine], default_model: Path, how: str
) -> None:
    engine = start(model=str(default_model), num_blocks=64, swap_every=1, **STORM)

    async def scenario(client: EngineClient) -> None:
        streams = make_streams(8, tokens=180)
        tasks = [asyncio.create_task(run_stream(client, stream)) for stream in streams]
        await status_where(client, lambda status: status.counters["kv_cpu_reload_blocks_total"] > 20)
        getattr(engine.core, how)()
        await asyncio.gather(*tasks)
        assert all(stream.error for stream in streams)
        await client.lost.wait()

    engine.run(scenario, 60)
    assert engine.core.wait(10) == (0 if how == "terminate" else -9)
    if how == "terminate":
        assert [path.name for path in engine.path.iterdir()] == ["lock"]


def test_a_host_pool_of_little_room_and_mixed_priorities_lose_nobody(
    start: Callable[..., LocalEngine], default_model: Path
) -> None:
    """40 at once in a device pool that is hardly larger than one needs, over a host pool for one of them."""
    engine = start(
        model=str(default_model), num_blocks=65, max_cpu_offload_mb=5, max_pause=0.001, **STORM | {"prefix_cache": True}
    )

    async def scenario(client: EngineClient) -> None:
        prefix = random_prompts(3, [24])[0]
        streams = make_streams(40, tokens=10)
        for number, stream in enumerate(streams):
            if number % 3 == 0:
                stream.prompt = prefix + stream.prompt
        done = await asyncio.gather(
            *(run_stream(client, stream, priority=number % 3) for number, stream in enumerate(streams))
        )
        assert [stream.error for stream in done if not stream.is_complete] == []
        status = await status_where(client, is_idle)
        assert status.gauges["swapped_requests"] == 0
        assert status.counters["requests_preempted_total"] > 0
        assert status.counters["requests_failed_total"] == 0

    engine.run(scenario, 120)
