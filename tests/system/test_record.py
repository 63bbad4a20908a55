"""What the real processes record replays to the same decisions. The engine runs no model: it is quick."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from frontend.engine_client import EngineClient
from protocol.messages import SamplingParams, TextParams, TokenPrompt, pack_i32
from tools.local_engine import LocalEngine
from tools.replay import replay

from .conftest import is_idle, status_where

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

SHARED = list(range(100, 140))


async def read(client: EngineClient, number: int, tokens: int) -> int:
    """A request of which every third is dropped half-way; how many tokens came."""
    count = 0
    prompt = SHARED[: number % 3 * 20] + [300 + number] * (1 + number % 50)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    async with client.generate(TokenPrompt(pack_i32(prompt)), sampling, TextParams()) as generation:
        async for _, delta in generation:
            count += delta.tokens
            if number % 3 == 0 and count > tokens // 2:
                break
    return count


def test_a_record_of_real_processes_replays_to_the_same_decisions(
    start: Callable[..., LocalEngine], default_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "record"
    options = {"block_size": 4, "num_blocks": 120, "max_cache": 256, "max_running": 12, "prefill_chunk_tokens": 32}
    engine = start(model=str(default_model), device="null", swap_every=3, record=str(path), **options)

    async def scenario(client: EngineClient) -> list[int]:
        counts = await asyncio.gather(*(read(client, number, 60) for number in range(60)))
        await status_where(client, is_idle)
        return counts

    counts = engine.run(scenario)
    assert [count for number, count in enumerate(counts) if number % 3] == [60] * 40
    engine.core.send_signal(signal.SIGTERM)
    assert engine.core.wait(10) == 0
    outcome = replay(path)
    assert outcome.difference == ""
    assert not outcome.truncated
    assert outcome.requests == 60
    assert outcome.unfinished == []
    assert outcome.swapped > 50
    assert outcome.resumed > 50
