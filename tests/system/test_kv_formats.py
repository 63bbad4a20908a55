"""KV formats through the real processes: the same tokens however a request is scheduled, and readable streams."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from frontend.engine_client import EngineClient
from protocol.messages import SamplingParams, TextParams, TextPrompt, TokenPrompt, pack_i32
from tools.local_engine import LocalEngine

from .conftest import is_idle, status_where

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2-greedy.json").read_text())["cases"]
PROMPTS = [case["prompt_ids"] + case["greedy_ids"] for case in CASES[::2]]  # 37 to 72 tokens
TOKENS = 16
# Where the two best log-probabilities are closer, a value that rounding moved to the next code may decide. Codes of
# e4m3 are up to an eighth apart.
TIES = {"int8": 0.05, "fp8_e4m3": 0.3}
BLOCK_BYTES = {"int8": 190_080, "fp8_e4m3": 184_320, "fp8_e5m2": 184_320, "fp8_per_token_head": 190_080}

Stream = list[tuple[int, float]]  # tokens, and by how much each was the likeliest


async def greedy(client: EngineClient, prompt: list[int]) -> Stream:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
    found: Stream = []
    async with client.generate(TokenPrompt(pack_i32(prompt)), sampling, TextParams()) as generation:
        async for _, delta in generation:
            for entry in delta.logprobs:
                best, second = (top.logprob for top in entry.top[:2])
                found.append((entry.chosen.token, best - second))
    assert len(found) == TOKENS
    return found


def compare(found: list[Stream], expected: list[Stream], tie: float, how: str) -> None:
    """Equal, but for what follows a near tie."""
    parted = 0
    for ours, theirs in zip(found, expected, strict=True):
        for step, ((token, _), (wanted, margin)) in enumerate(zip(ours, theirs, strict=True)):
            if token != wanted:
                assert margin < tie, f"{how}: token {step} is {token}, not {wanted}"
                parted += 1
                break
    assert parted <= 2, how


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_scheduling_does_not_change_tokens(start: Callable[..., LocalEngine], default_model: Path, name: str) -> None:
    """Alone without anything cached, from the prefix cache, batched, in chunks, preempted."""
    options = {"model": str(default_model), "dtype": "fp32", "weights": "dense", "kv_cache_dtype": name}
    tie = TIES[name]

    async def alone(client: EngineClient) -> list[Stream]:
        return [await greedy(client, prompt) for prompt in PROMPTS]

    async def together(client: EngineClient) -> list[Stream]:
        return list(await asyncio.gather(*(greedy(client, prompt) for prompt in PROMPTS)))

    async def cached(client: EngineClient) -> tuple[list[Stream], list[Stream], list[Stream]]:
        miss, hit, batched = await alone(client), await alone(client), await together(client)
        status = await status_where(client, is_idle)
        assert status.counters["prefix_cache_hit_tokens_total"] > sum(map(len, PROMPTS))
        return miss, hit, batched

    engine = start(**options, block_size=4, max_cache=512)
    expected, hit, batched = engine.run(cached, 250)
    engine.stop()
    compare(hit, expected, tie, "hit")
    compare(batched, expected, tie, "batched")

    engine = start(**options, prefill_chunk_tokens=7, prefix_cache=False, max_cache=512)
    compare(engine.run(together, 250), expected, tie, "chunked")
    engine.stop()

    async def preempted(client: EngineClient) -> list[Stream]:
        found = await together(client)
        status = await status_where(client, is_idle)
        assert status.counters["requests_preempted_total"] > 0
        return found

    engine = start(**options, block_size=4, num_blocks=60, max_cache=160, prefix_cache=False)
    compare(engine.run(preempted, 250), expected, tie, "preempted")


@pytest.mark.parametrize("name", BLOCK_BYTES)
def test_streams(start: Callable[..., LocalEngine], default_model: Path, name: str) -> None:
    """The right words in the default dtype, and a status that names the format and its bytes."""
    engine = start(model=str(default_model), kv_cache_dtype=name, max_cache=512)

    async def scenario(client: EngineClient) -> str:
        prompt = TextPrompt("1, 2, 3, 4, 5,")
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        text, deltas = "", 0
        async with client.generate(prompt, sampling, TextParams()) as generation:
            async for _, delta in generation:
                text, deltas = text + delta.text, deltas + 1
        assert deltas > 1
        status = await status_where(client, is_idle)
        assert status.model.kv_cache_dtype == name
        assert status.memory["kv_block"] == BLOCK_BYTES[name]
        return text

    assert engine.run(scenario).startswith(" 6, 7, 8")
