"""More work than KV fits: 2 and 4 times the pool, over the real processes; swap beside recompute and beside enough KV.

    python tools/bench_oversubscription.py [--checkpoint MODEL] [--fits 6] [--factors 2,4] [--rounds 3]
        [--kv-cache-dtype auto] [--threads N] [--output FILE.json]

All requests come at once: distinct prompts, lengths of prompt and answer mixed, EOS ignored. The pool holds `--fits`
requests of mean length; `fits` x factor requests are sent. The three ways take turns within a round:

    enough      a pool that holds all, `max_running` = fits: nothing is ever preempted, the others queue
    swap        the small pool, swap as it is by default
    recompute   the small pool, `--preemption recompute`

Reported per way: requests that finished with all their tokens, errors, tokens per second (all answers, from the first
submit to the last token), its ratio to `enough` of the same round, TTFT, and the longest silence between two deltas of
a request, of those that were preempted and of the others apart. Goal: all finish, ratio at least 0.9.
"""

import argparse
import asyncio
import json
import random
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from frontend.engine_client import EngineClient
from frontend.models import DEFAULT_MODEL, local_path
from protocol.config import EngineConfig
from tools.environment import describe
from tools.local_engine import LocalEngine
from tools.streams import Stream, fresh_status, random_prompts, run_stream

GOAL = 0.9
PROMPTS, ANSWERS = (24, 200), (32, 96)  # tokens, from and to
BLOCK_SIZE = 16
COUNTERS = ("requests_swapped", "requests_resumed", "requests_recomputed", "kv_cpu_offload_blocks",
            "kv_cpu_reload_blocks", "prompt_tokens", "steps")  # fmt: skip
Figures = dict[str, Any]


def make_streams(count: int, seed: int) -> list[Stream]:
    """Requests of mixed lengths, the same for the same seed."""
    draw = random.Random(seed)
    lengths = [draw.randint(*PROMPTS) for _ in range(count)]
    return [Stream(prompt, draw.randint(*ANSWERS)) for prompt in random_prompts(seed, lengths)]


def blocks_of(streams: list[Stream]) -> int:
    """Blocks that all of them need at their ends."""
    return sum(-(-(len(stream.prompt) + stream.max_tokens - 1) // BLOCK_SIZE) for stream in streams)


def configs(options: argparse.Namespace, blocks: int, most: int) -> dict[str, EngineConfig]:
    """The three ways. `blocks` is the small pool, `most` what all need."""
    common = {
        "model": str(options.checkpoint),
        "device": options.device,
        "kv_cache_dtype": options.kv_cache_dtype,
        "threads": options.threads,
        "block_size": BLOCK_SIZE,
        "max_cache": PROMPTS[1] + ANSWERS[1],
    }
    return {
        "enough": EngineConfig(**common, num_blocks=most, max_running=options.fits),
        "swap": EngineConfig(**common, num_blocks=blocks),
        "recompute": EngineConfig(**common, num_blocks=blocks, preemption="recompute"),
    }


async def run_once(client: EngineClient, streams: list[Stream]) -> Figures:
    """One run of all requests."""
    before = (await fresh_status(client)).counters
    await asyncio.gather(*(run_stream(client, stream) for stream in streams))
    status = await fresh_status(client)
    ended = max((stream.times[-1] for stream in streams if stream.times), default=0.0)
    seconds = ended - min(stream.submitted for stream in streams)
    silence: dict[bool, list[float]] = {True: [], False: []}
    for stream in streams:
        silence[stream.was_paused].append(max(stream.gaps, default=0.0))
    ttft = sorted(stream.ttft for stream in streams)
    held = status.gauges["kv_blocks_total"] - status.gauges["kv_blocks_free"] - status.gauges["kv_blocks_cached"]
    return {
        "requests": len(streams),
        "completed": sum(stream.is_complete for stream in streams),
        "errors": [stream.error for stream in streams if stream.error],
        "tokens_per_second": round(sum(stream.max_tokens for stream in streams) / seconds, 2),
        "seconds": round(seconds, 3),
        "preempted": len(silence[True]),
        "max_silence_preempted_s": round(max(silence[True], default=0.0), 3),
        "max_silence_others_s": round(max(silence[False], default=0.0), 3),
        "ttft_p50_s": round(median(ttft), 3),
        "ttft_max_s": round(ttft[-1], 3),
        "blocks_left_held": held,
        "texts": [stream.text for stream in streams],
    } | {name: int(status.counters[f"{name}_total"] - before[f"{name}_total"]) for name in COUNTERS}


async def measure(paths: dict[str, Path], options: argparse.Namespace) -> dict[int, dict[str, list[Figures]]]:
    """By factor and way, the figures of all rounds."""
    clients = {way: await EngineClient.connect(path, 120) for way, path in paths.items()}
    figures: dict[int, dict[str, list[Figures]]] = {}
    try:
        for client in clients.values():
            await run_once(client, make_streams(options.fits, seed=1))
        for number in range(options.rounds):
            for factor in options.factors:
                seed = 1000 * (number + 1) + factor
                for way, client in clients.items():
                    result = await run_once(client, make_streams(options.fits * factor, seed))
                    figures.setdefault(factor, {}).setdefault(way, []).append(result)
    finally:
        for client in clients.values():
            await client.close()
    return figures


def summarize(rounds: dict[str, list[Figures]]) -> dict[str, Figures]:
    """One line per way: medians of what was measured, sums of what was counted."""
    summary = {}
    for way, runs in rounds.items():
        ratios = [
            run["tokens_per_second"] / enough["tokens_per_second"]
            for run, enough in zip(runs, rounds["enough"], strict=True)
        ]
        ttft = [run["ttft_p50_s"] / enough["ttft_p50_s"] for run, enough in zip(runs, rounds["enough"], strict=True)]
        same = sum(
            ours == theirs
            for run, enough in zip(runs, rounds["enough"], strict=True)
            for ours, theirs in zip(run.pop("texts") if way != "enough" else run["texts"], enough["texts"], strict=True)
        )
        summary[way] = (
            {name: sum(run[name] for run in runs) for name in ("requests", "completed", *COUNTERS, "preempted")}
            | {"errors": sum(len(run["errors"]) for run in runs), "ratio": round(median(ratios), 3)}
            | {"ratios": [round(ratio, 3) for ratio in ratios], "same_text_as_enough": same}
            | {"ttft_p50_ratio": round(median(ttft), 3)}
            | {name: median(run[name] for run in runs) for name in ("tokens_per_second", "ttft_p50_s")}
            | {name: max(run[name] for run in runs) for name in runs[0] if name.startswith(("max_", "ttft_max"))}
            | {"blocks_left_held": max(run["blocks_left_held"] for run in runs)}
        )
    return summary


def report(factor: int, summary: dict[str, Figures]) -> None:
    print(
        f"{f'{factor}x':11}{'done':>9}{'errors':>8}{'tokens/s':>10}{'ratio':>7}{'TTFT p50':>10}{'ratio':>7}{'max':>8}"
        f"{'preempted':>11}{'silence':>9}{'others':>9}{'swaps':>7}{'recomputes':>11}"
    )
    for way, one in summary.items():
        print(
            f"{way:11}{one['completed']:>5}/{one['requests']}{one['errors']:>8}{one['tokens_per_second']:>10.1f}"
            f"{one['ratio']:>7.2f}{one['ttft_p50_s']:>8.2f} s{one['ttft_p50_ratio']:>7.2f}{one['ttft_max_s']:>6.2f} s"
            f"{one['preempted']:>11}"
            f"{one['max_silence_preempted_s']:>7.2f} s{one['max_silence_others_s']:>7.2f} s"
            f"{one['requests_swapped']:>7}{one['requests_recomputed']:>11}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=local_path(DEFAULT_MODEL), help="GGUF file or folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="of the model; 0: by measurement")
    parser.add_argument("--fits", type=int, default=6, help="requests of mean length that the pool holds")
    parser.add_argument("--factors", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    sample = make_streams(1000, seed=0)
    blocks = options.fits * blocks_of(sample) // len(sample)
    most = options.fits * max(options.factors) * (PROMPTS[1] + ANSWERS[1]) // BLOCK_SIZE
    with tempfile.TemporaryDirectory(prefix="pt-") as directory, ExitStack() as stack:
        paths = {}
        for way, config in configs(options, blocks, most).items():
            engine = LocalEngine(Path(directory) / way, config)
            stack.callback(engine.stop)
            paths[way] = engine.path
        rounds = asyncio.run(measure(paths, options))
    figures = {factor: summarize(ways) for factor, ways in rounds.items()}
    for factor, summary in figures.items():
        report(factor, summary)
    swaps = [summary["swap"] for summary in figures.values()]
    is_right = all(one["completed"] == one["requests"] and not one["errors"] for one in swaps)
    is_met = is_right and all(one["ratio"] >= GOAL for one in swaps)
    print(f"goal: all done without errors, ratio at least {GOAL}: {'met' if is_met else 'MISSED'}")
    if options.output:
        settings = {"pool_blocks": blocks, "fits": options.fits, "rounds": options.rounds, "threads": options.threads}
        report_ = {"goal_met": is_met, "factors": figures, "settings": settings, "environment": describe()}
        options.output.write_text(json.dumps(report_, indent=1))
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
