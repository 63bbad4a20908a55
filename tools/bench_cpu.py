"""Speed of the engine on the CPU, through its real processes, beside transformers on the same weights in the same run.

    python tools/bench_cpu.py [--model FILE] [--streams 1,4,8] [--tokens 128] [--prefill 512] [--rounds 3]
        [--peers] [--output FILE.json]

Decode is tokens per second over all streams between the first and the last token of a run; prefill is prompt tokens
over the time to the first token. Rounds of the engines alternate, and each figure is the median of its rounds. Absolute
figures drift between machines: read the ratios. `--peers` needs the dev extras (transformers).
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from frontend.engine_client import EngineClient
from frontend.models import DEFAULT_MODEL, local_path
from protocol.config import EngineConfig
from protocol.messages import SamplingParams, TextParams, TokenPrompt, pack_i32
from tools.local_engine import LocalEngine

SHORT_PROMPT = 8  # tokens


def random_prompt(length: int) -> list[int]:
    return [random.randrange(1000, 40000) for _ in range(length)]


def prompts(streams: int) -> list[list[int]]:
    return [random_prompt(SHORT_PROMPT) for _ in range(streams)]


def load_peer(model: Path) -> Any:
    # The peer gets what the core gets (engine_core/load.py): else it stalls when another process wants a core.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    from tools.transformers_peer import Peer

    return Peer(model)


async def one_stream(client: EngineClient, prompt: list[int], tokens: int) -> tuple[float, float]:
    """Times of the first and of the last token."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    first = 0.0
    async with client.generate(TokenPrompt(pack_i32(prompt)), sampling, TextParams()) as generation:
        async for _ in generation:
            first = first or time.perf_counter()
    return first, time.perf_counter()


def ours_decode(engine: LocalEngine, streams: int, tokens: int) -> float:
    async def scenario(client: EngineClient) -> float:
        times = await asyncio.gather(*(one_stream(client, prompt, tokens) for prompt in prompts(streams)))
        seconds = max(last for _, last in times) - min(first for first, _ in times)
        return streams * (tokens - 1) / seconds

    return float(engine.run(scenario, 600))


def ours_prefill(engine: LocalEngine, length: int) -> float:
    async def scenario(client: EngineClient) -> float:
        started = time.perf_counter()
        first, _ = await one_stream(client, random_prompt(length), 1)
        return length / (first - started)

    return float(engine.run(scenario, 600))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=local_path(DEFAULT_MODEL))
    parser.add_argument("--streams", default="1,4,8")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--peers", action="store_true", help="measure transformers, too")
    parser.add_argument("--output", help="write the figures as JSON")
    options = parser.parse_args()
    streams = [int(part) for part in options.streams.split(",")]
    config = EngineConfig(
        model=str(options.model),
        weights=options.weights,
        dtype=options.dtype,
        threads=options.threads,
        prefill_chunk_tokens=max(512, options.prefill),
        prefix_cache=False,
    )
    peer = load_peer(options.model) if options.peers else None
    figures: dict[str, dict[str, list[float]]] = {"pagetide": {}} | ({"transformers bf16": {}} if peer else {})

    def add(name: str, case: str, measure: Callable[[], float]) -> None:
        figures[name].setdefault(case, []).append(measure())

    with tempfile.TemporaryDirectory(prefix="pt-") as directory:
        engine = LocalEngine(Path(directory), config)
        try:
            ours_decode(engine, 1, 8)
            if peer:
                peer.decode(prompts(1), 8)
            for _ in range(options.rounds):
                for count in streams:
                    add("pagetide", f"decode {count}", partial(ours_decode, engine, count, options.tokens))
                    if peer:
                        run = partial(peer.decode, prompts(count), options.tokens)
                        add("transformers bf16", f"decode {count}", run)
                add("pagetide", f"prefill {options.prefill}", partial(ours_prefill, engine, options.prefill))
                if peer:
                    run = partial(peer.prefill, random_prompt(options.prefill))
                    add("transformers bf16", f"prefill {options.prefill}", run)
        finally:
            engine.stop()
    report(figures)
    if options.output:
        Path(options.output).write_text(json.dumps({"tok/s": figures, "options": vars(options)}, default=str, indent=1))


def report(figures: dict[str, dict[str, list[float]]]) -> None:
    """One line per case: tokens per second, and the ratio to the peer."""
    names = list(figures)
    print(f"{'tok/s':14}" + "".join(f"{name:>20}" for name in names) + ("   ratio" if len(names) > 1 else ""))
    for case in figures[names[0]]:
        values = [median(figures[name][case]) for name in names]
        ratio = f"{values[0] / values[1]:8.2f}" if len(values) > 1 else ""
        print(f"{case:14}" + "".join(f"{value:20.1f}" for value in values) + ratio)


if __name__ == "__main__":
    main()
