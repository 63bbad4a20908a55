"""Intake under a swap storm: the time from submit to the core's acknowledgement, calm and with a swap at every step.

    python tools/bench_intake.py [--checkpoint MODEL] [--submits 200] [--rounds 3] [--streams 6]
        [--threads N] [--output FILE.json]

Two engines, alike but for `swap_every`, take turns: in each round either decodes `--streams` long streams while
`--submits` short text requests come in at random moments. Timed is what a frontend sees: client -> tokenizer -> core's
intake thread -> tokenizer -> client. Goal: a ratio of the p99s of at most 1.2, or both under 5 ms.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frontend.engine_client import EngineClient
from frontend.models import DEFAULT_MODEL, local_path
from protocol.config import EngineConfig
from protocol.messages import SamplingParams, TextParams, TextPrompt
from tools.environment import describe
from tools.local_engine import LocalEngine
from tools.streams import Stream, fresh_status, random_prompts, run_stream

GOAL_RATIO, GOAL_MS = 1.2, 5.0
PAUSE = 0.06  # seconds between submits at most; random, so that they meet steps at any point
PROMPT_TOKENS, STREAM_TOKENS = 64, 128
NAMES = {0: "quiet", 1: "swapping"}  # by swap_every


async def keep_streaming(client: EngineClient, seed: int) -> None:
    """A stream, and another one when it ends, until cancelled."""
    for number in range(1 << 20):
        (prompt,) = random_prompts(seed * 1000 + number, [PROMPT_TOKENS])
        stream = await run_stream(client, Stream(prompt, STREAM_TOKENS))
        if not stream.is_complete:
            raise RuntimeError(f"a stream ended with {stream.finish}: {stream.error}")


async def time_submit(client: EngineClient, number: int) -> tuple[float, float]:
    """Seconds from submit to the acknowledgement, and to the moment when the core's intake thread had it."""
    prompt = TextPrompt(f"Question {number}: what is the capital of France?")
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
        submits.append(asyncio.create_task(time_submit(client, number)))
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


def percentile(times: Sequence[float], share: float) -> float:
    """In milliseconds."""
    return sorted(times)[min(len(times) - 1, int(len(times) * share))] * 1000


@contextmanager
def engines(options: argparse.Namespace) -> Iterator[dict[int, LocalEngine]]:
    """One without and one with forced swaps."""
    started: dict[int, LocalEngine] = {}
    with tempfile.TemporaryDirectory(prefix="pt-") as directory:
        try:
            for swap_every in NAMES:
                config = EngineConfig(
                    model=str(options.checkpoint),
                    device=options.device,
                    threads=options.threads,
                    max_cache=512,
                    swap_every=swap_every,
                )
                started[swap_every] = LocalEngine(Path(directory) / str(swap_every), config)
            yield started
        finally:
            for engine in started.values():
                engine.stop()


async def measure(paths: dict[int, Path], options: argparse.Namespace) -> dict[int, list[dict[str, Any]]]:
    clients = {swap_every: await EngineClient.connect(path, 60) for swap_every, path in paths.items()}
    phases: dict[int, list[dict[str, Any]]] = {swap_every: [] for swap_every in clients}
    try:
        for number in range(-1, options.rounds):  # the first is a warm-up
            for swap_every, client in clients.items():
                phase = await run_phase(client, options, number + 1)
                if number >= 0:
                    phases[swap_every].append(phase)
    finally:
        for client in clients.values():
            await client.close()
    return phases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=local_path(DEFAULT_MODEL), help="GGUF file or folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="of the model; 0: by measurement")
    parser.add_argument("--submits", type=int, default=200, help="in each phase")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=6, help="that decode meanwhile")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    with engines(options) as running:
        phases = asyncio.run(measure({key: engine.path for key, engine in running.items()}, options))
    figures: dict[str, Any] = {}
    print(f"{'':10}{'p50':>10}{'p99':>10}{'max':>10}{'submits':>9}{'steps':>8}{'swaps':>8}")
    for swap_every, name in NAMES.items():
        times = [seconds for phase in phases[swap_every] for seconds in phase["times"]]
        steps, swaps = (int(sum(one[key] for one in phases[swap_every])) for key in ("steps", "requests_swapped"))
        values = [percentile(times, share) for share in (0.5, 0.99, 1.0)]
        print(f"{name:10}" + "".join(f"{value:7.2f} ms" for value in values) + f"{len(times):9}{steps:8}{swaps:8}")
        figures |= {
            f"{what}_ms_{name}": round(value, 3) for what, value in zip(("p50", "p99", "max"), values, strict=True)
        }
        to_core = [seconds for phase in phases[swap_every] for seconds in phase["to_core"]]
        figures |= {f"p{share}_ms_to_core_{name}": round(percentile(to_core, share / 100), 3) for share in (50, 99)}
        figures |= {f"steps_{name}": steps, f"swaps_{name}": swaps}
        figures[f"p99_ms_{name}_by_round"] = [round(percentile(one["times"], 0.99), 3) for one in phases[swap_every]]
    figures["p99_ratio"] = round(figures["p99_ms_swapping"] / figures["p99_ms_quiet"], 3)
    is_met = figures["p99_ratio"] <= GOAL_RATIO or max(figures["p99_ms_quiet"], figures["p99_ms_swapping"]) < GOAL_MS
    goal = f"goal {GOAL_RATIO} or both under {GOAL_MS:g} ms: {'met' if is_met else 'MISSED'}"
    print(f"p99 ratio {figures['p99_ratio']:.2f}; {goal}")
    if options.output:
        settings = {name: getattr(options, name) for name in ("submits", "rounds", "streams", "threads")}
        report = figures | {"goal_met": is_met} | settings | {"environment": describe()}
        options.output.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
