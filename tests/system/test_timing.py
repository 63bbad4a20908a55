"""Where the time of requests went, over the real processes and with the KV of one swapped out now and then."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from frontend.engine_client import EngineClient
from frontend.timing import PHASES, Times
from protocol.messages import SamplingParams, TextParams, TextPrompt
from tools.local_engine import LocalEngine

from .conftest import is_idle, status_where

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]


async def ask(client: EngineClient, seed: int, text: TextParams) -> tuple[Times, float]:
    """The times of an answer of 40 tokens, and its longest gap."""
    sampling = SamplingParams(max_tokens=40, seed=seed, ignore_eos=True)
    async with client.generate(TextPrompt("Once upon a time"), sampling, text) as generation:
        async for _ in generation:
            pass
    return generation.times[0], generation.gaps[0]


def test_the_phases_explain_the_time(start: Callable[..., LocalEngine], default_model: Path) -> None:
    """Also where a stop string ends the answer, if the timing was asked for."""
    engine = start(model=str(default_model), num_blocks=12, max_cache=64, preemption="swap", swap_every=5)

    async def scenario(client: EngineClient) -> None:
        texts = [TextParams(), TextParams(), TextParams(stop=["e"], timing=True)]
        for times, gap in await asyncio.gather(*(ask(client, i, text) for i, text in enumerate(texts))):
            parts = {phase: getattr(times, phase) for phase in PHASES}
            assert all(seconds >= 0 for phase, seconds in parts.items() if phase != "residual"), parts
            assert sum(parts.values()) == pytest.approx(times.total)
            assert abs(times.residual) < 0.01 * times.total
            assert times.prefill > 0
            assert 0 <= gap < times.total
        status = await status_where(client, is_idle)
        assert status.counters["requests_swapped_total"] > 0

    engine.run(scenario)
