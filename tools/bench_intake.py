"""Intake under a swap storm: the time from submit to the core's acknowledgement, calm and with a swap at every step.

    python -m tools.bench_intake [--checkpoint MODEL] [--submits 200] [--iterations 3] [--streams 6] [--max-cache 512]
        [--backend w4a16] [--kv-cache-dtype fp8] [--device cuda] [--in-process] [--output FILE.json]

Two engines, alike but for `swap_every`, take turns: in each iteration either decodes `--streams` long streams while
`--submits` short requests (texts; token ids with random weights) come in at random moments. Timed is what a frontend
sees: client -> tokenizer -> core's intake thread -> tokenizer -> client. Goal: a ratio of the p99s of at most 1.2, or
both under 5 ms.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from frontend.engine_client import EngineClient
from protocol.messages import Prompt, SamplingParams, TextParams, TextPrompt, TokenPrompt, pack_i32
from tools.local_engine import run_with
from tools.measurement import (
    Column,
    Figures,
    checked,
    config_of,
    engine,
    parser_of,
    percentile,
    print_table,
    save,
)
from tools.streams import Stream, fresh_status, random_prompts, run_stream

GOAL_RATIO, GOAL_MS = 1.2, 5.0
PAUSE = 0.06  # seconds between submits at most; random, so that they meet steps at any point
PROMPT_TOKENS, STREAM_TOKENS = 64, 128
NAMES = {0: "quiet", 1: "swapping"}  # by swap_every
COLUMNS: list[Column] = [
    ("", "name", "s"),
    ("p50 ms", "p50_ms", ".2f"),
    ("p99 ms", "p99_ms", ".2f"),
    ("max ms", "max_ms", ".2f"),
    ("submits", "submits", "d"),
    ("steps", "steps", "d"),
    ("swaps", "requests_swapped", "d"),
    ("p50 ms to core", "p50_ms_to_core", ".2f"),
]


async def keep_streaming(client: EngineClient, seed: int) -> None:
    """A stream, and another one when it ends, until cancelled."""
    for number in range(1 << 20):
        (prompt,) = random_prompts(seed * 1000 + number, [PROMPT_TOKENS])
        stream = await run_stream(client, Stream(prompt, STREAM_TOKENS))
        if not stream.is_complete:
            raise RuntimeError(f"a stream ended with {stream.finish}: {stream.error}")


def short_prompt(number: int, options: argparse.Namespace) -> Prompt:
    """A text; token ids for random weights, which take nothing else."""
    if options.load_format != "dummy":
        return TextPrompt(f"Question {number}: what is the capital of France?")
    (ids,) = random_prompts(number, [12])
    return TokenPrompt(pack_i32(ids))


async def time_submit(client: EngineClient, prompt: Prompt) -> tuple[float, float]:
    """Seconds from submit to the acknowledgement, and to the moment when the core's intake thread had it."""
    started = time.monotonic()
    async with client.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0), TextParams()) as generation:
        seconds = time.monotonic() - started
        async for _, delta in generation:
            if delta.timing is not None:
                arrival = delta.timing.arrival
    return seconds, arrival - started


async def run_phase(client: EngineClient, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Times of one phase, in seconds, and how many steps and swaps there were."""
    load = [asyncio.create_task(keep_streaming(client, seed * 100 + n)) for n in range(options.streams)]
    draw = random.Random(seed)
    await asyncio.sleep(0.5)
    before = (await fresh_status(client)).counters
    submits = []
    for number in range(options.submits):
        submits.append(asyncio.create_task(time_submit(client, short_prompt(number, options))))
        await asyncio.sleep(draw.uniform(0, PAUSE))
    pairs = await asyncio.gather(*submits)
    after = (await fresh_status(client)).counters
    for task in load:
        task.cancel()
    results = await asyncio.gather(*load, return_exceptions=True)
    for error in (result for result in results if isinstance(result, Exception)):
        raise error
    counts = {name: after[f"{name}_total"] - before[f"{name}_total"] for name in ("steps", "requests_swapped")}
    return {"times": [pair[0] for pair in pairs], "to_core": [pair[1] for pair in pairs]} | counts


async def measure(paths: dict[int, Path], options: argparse.Namespace) -> dict[int, list[dict[str, Any]]]:
    clients = {swap_every: await EngineClient.connect(path, 60) for swap_every, path in paths.items()}
    phases: dict[int, list[dict[str, Any]]] = {swap_every: [] for swap_every in clients}
    try:
        for number in range(-1, options.iterations):  # the first is a warm-up
            for swap_every, client in clients.items():
                phase = await run_phase(client, options, number + 1)
                if number >= 0:
                    phases[swap_every].append(phase)
    finally:
        for client in clients.values():
            await client.close()
    return phases


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, max_cache=512)
    parser.add_argument("--submits", type=int, default=200, help="in each phase")
    parser.add_argument("--streams", type=int, default=6, help="that decode meanwhile")
    options = checked(parser, arguments)
    if options.max_cache < PROMPT_TOKENS + STREAM_TOKENS:
        parser.error(f"--max-cache {options.max_cache} holds no stream of {PROMPT_TOKENS + STREAM_TOKENS} tokens")
    if min(options.submits, options.streams) < 1:
        parser.error("--submits or --streams is out of range: from 1")
    return options


def summarize(phases: dict[int, list[dict[str, Any]]]) -> Figures:
    """Percentiles over all phases of each kind, and whether the goal is met."""
    figures: Figures = {}
    for swap_every, name in NAMES.items():
        some = phases[swap_every]
        times = [1e3 * seconds for phase in some for seconds in phase["times"]]
        to_core = [1e3 * seconds for phase in some for seconds in phase["to_core"]]
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        figures |= {f"{what}_ms_{name}": percentile(times, share) for what, share in shares.items()}
        figures |= {f"p{share}_ms_to_core_{name}": percentile(to_core, share / 100) for share in (50, 99)}
        figures |= {f"{key}_{name}": int(sum(one[key] for one in some)) for key in ("steps", "requests_swapped")}
        figures[f"submits_{name}"] = len(times)
        figures[f"p99_ms_{name}_by_round"] = [1e3 * percentile(one["times"], 0.99) for one in some]
    figures["p99_ratio"] = figures["p99_ms_swapping"] / figures["p99_ms_quiet"]
    is_short = max(figures["p99_ms_quiet"], figures["p99_ms_swapping"]) < GOAL_MS
    return figures | {"goal_met": figures["p99_ratio"] <= GOAL_RATIO or is_short}


def report(figures: Figures) -> None:
    keys = ("p50_ms", "p99_ms", "max_ms", "submits", "steps", "requests_swapped", "p50_ms_to_core")
    rows = [{"name": name} | {key: figures[f"{key}_{name}"] for key in keys} for name in NAMES.values()]
    print_table(rows, COLUMNS)
    goal = f"goal {GOAL_RATIO} or both under {GOAL_MS:g} ms: {'met' if figures['goal_met'] else 'MISSED'}"
    print(f"p99 ratio {figures['p99_ratio']:.2f}; {goal}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with ExitStack() as stack:
        # The first one is what profilers see.
        engines = {n: stack.enter_context(engine(config_of(options, swap_every=n), options.in_process)) for n in (1, 0)}
        paths = {n: engines[n].path for n in NAMES}
        figures = summarize(run_with([*engines.values()], measure(paths, options)))
    report(figures)
    save(options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
