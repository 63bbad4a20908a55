"""The default model through the real processes, against greedy token ids that transformers computed in FP32."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frontend.engine_client import EngineClient
from protocol.messages import SamplingParams, TextParams, TokenPrompt, pack_i32
from tools.local_engine import LocalEngine

from .conftest import is_idle, status_where

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

REFERENCE = Path(__file__).parents[1] / "data" / "smollm2-greedy.json"
CASES: list[dict[str, Any]] = json.loads(REFERENCE.read_text())["cases"]
TIE = 0.01  # a step whose two best log-probabilities are closer may go either way


async def greedy(client: EngineClient, case: dict[str, Any], forced: int = 0) -> list[int]:
    """Token ids for a case, after its first `forced` reference tokens."""
    prompt = TokenPrompt(pack_i32(case["prompt_ids"] + case["greedy_ids"][:forced]))
    sampling = SamplingParams(max_tokens=32 - forced, temperature=0.0, ignore_eos=True, logprobs=0)
    ids: list[int] = []
    async with client.generate(prompt, sampling, TextParams()) as generation:
        async for _, delta in generation:
            ids += [entry.chosen.token for entry in delta.logprobs]
    return ids


async def check(client: EngineClient, case: dict[str, Any]) -> None:
    """Greedy ids equal the reference; where they part at a near tie, go on from the reference's token."""
    start = 0
    while start < 32:
        ids = await greedy(client, case, start)
        assert len(ids) == 32 - start
        reference = case["greedy_ids"][start:]
        differing = [i for i in range(len(ids)) if ids[i] != reference[i]]
        if not differing:
            return
        step = start + differing[0]
        top = case["top3_logprobs"][step]
        assert top[0][1] - top[1][1] < TIE, f"{case['prompt']!r}: token {step} is {ids[differing[0]]}, not {top[0][0]}"
        assert ids[differing[0]] in [token for token, _ in top]
        start = step + 1


VARIANTS = {
    "alone": {},
    "chunked": {"prefill_chunk_tokens": 7, "block_size": 4},
    "preempted": {"num_blocks": 40, "block_size": 4, "max_cache": 160, "prefix_cache": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_ids_equal_the_reference(start: Callable[..., LocalEngine], default_model: Path, variant: str) -> None:
    engine = start(model=str(default_model), dtype="fp32", weights="dense", **VARIANTS[variant])

    async def scenario(client: EngineClient) -> None:
        if variant == "alone":
            for case in CASES:
                await check(client, case)
            hits = (client.status.counters if client.status else {})["prefix_cache_hit_tokens_total"]
            await asyncio.gather(*(check(client, case) for case in CASES))  # batched, and found in the prefix cache
            await status_where(client, lambda s: s.counters["prefix_cache_hit_tokens_total"] > hits)
        else:
            await asyncio.gather(*(check(client, case) for case in CASES))
        status = await status_where(client, is_idle)
        assert (status.counters["requests_preempted_total"] > 0) == (variant == "preempted")

    engine.run(scenario, 250)


def test_a_seeded_request_gives_the_same_tokens_when_it_is_preempted(
    start: Callable[..., LocalEngine], default_model: Path
) -> None:
    """Failure report B3: its draws depend on (seed, choice, position), and not on where or when it runs."""
    engine = start(model=str(default_model), dtype="fp32", weights="dense", **VARIANTS["preempted"])
    prompt = TokenPrompt(pack_i32(CASES[0]["prompt_ids"]))

    async def seeded(client: EngineClient) -> list[int]:
        sampling = SamplingParams(max_tokens=40, seed=42, ignore_eos=True, logprobs=0)
        async with client.generate(prompt, sampling, TextParams(), priority=1) as generation:
            return [entry.chosen.token async for _, delta in generation for entry in delta.logprobs]

    async def other(client: EngineClient, seed: int) -> None:
        sampling = SamplingParams(max_tokens=40, seed=seed, ignore_eos=True)
        async with client.generate(prompt, sampling, TextParams()) as generation:
            async for _ in generation:
                pass

    async def scenario(client: EngineClient) -> None:
        alone = await seeded(client)
        assert len(alone) == 40
        before = (await status_where(client, is_idle)).counters["requests_preempted_total"]
        crowded, *_ = await asyncio.gather(seeded(client), *(other(client, seed) for seed in (7, 42, 43, 44)))
        assert crowded == alone
        # It is the last in order, so it is the one that was preempted.
        await status_where(client, lambda s: s.counters["requests_preempted_total"] > before)

    engine.run(scenario, 30)
