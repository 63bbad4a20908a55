"""Gaps between tokens with and without swapping, over the real processes; swapped requests and bystanders apart.

    python -m tools.bench_tpot_jitter [--checkpoint MODEL] [--backend w4a16] [--kv-cache-dtype fp8] [--device cuda]
        [--concurrency 4] [--prompt-tokens 64] [--max-new-tokens 64] [--max-cache 256] [--modes calm,storm,tight]
        [--swap-every 8] [--max-pause 0.5] [--iterations 3] [--output FILE.json]

`--concurrency` requests come at once, `--iterations` times, in three engines one after the other:

    calm    blocks for all: nothing is ever swapped
    storm   the same, and a swap is forced at every n-th step (`--swap-every`)
    tight   half of the blocks that they need

A gap is from one token to the next, as the client sees it. It is a pause if the request was told to be swapped out (or
to run again) within it; all others are gaps of bystanders, whatever is copied beside them. So a pause has in it what
the swapped one waits for (copy out, a free place, copy in), and the bystanders' gaps show what a swap costs the others.
"""

import argparse
import sys
from collections.abc import Sequence

from frontend.engine_client import EngineClient
from protocol.config import EngineConfig
from tools.measurement import (
    Column,
    Figures,
    checked,
    config_of,
    engine,
    make_streams,
    parser_of,
    percentile,
    print_table,
    run_all,
    save,
    spread,
)
from tools.streams import Stream, fresh_status

MODES = ("calm", "storm", "tight")
COUNTERS = ("requests_swapped", "requests_resumed", "requests_recomputed")
COLUMNS: list[Column] = [
    ("", "mode", "s"),
    ("done", "done", "s"),
    ("swaps", "requests_swapped", "d"),
    ("bystander p50 ms", "bystander_gap_ms_p50", ".2f"),
    ("p95", "bystander_gap_ms_p95", ".2f"),
    ("p99", "bystander_gap_ms_p99", ".2f"),
    ("max", "bystander_gap_ms_max", ".2f"),
    ("p99 / calm", "bystander_p99_ratio", ".2f"),
    ("pause p50 ms", "pause_ms_p50", ".1f"),
    ("max", "pause_ms_max", ".1f"),
    ("TPOT swapped s", "swapped_tpot_p50_s", ".4f"),
    ("others s", "other_tpot_p50_s", ".4f"),
]


async def run_mode(client: EngineClient, options: argparse.Namespace) -> Figures:
    """What the iterations in one engine give, after one that isn't counted."""
    lengths = (options.prompt_tokens, options.max_new_tokens)
    await run_all(client, make_streams(client, options.concurrency, lengths, seed=99))
    before = (await fresh_status(client)).counters
    streams: list[Stream] = []
    for number in range(options.iterations):
        some = make_streams(client, options.concurrency, lengths, seed=number)
        await run_all(client, some, with_notices=True)
        streams += some
    after = (await fresh_status(client)).counters
    return summarize(streams) | {name: int(after[f"{name}_total"] - before[f"{name}_total"]) for name in COUNTERS}


def split(stream: Stream) -> tuple[list[float], list[float]]:
    """Its gaps in which it was paused, and the others; seconds."""
    running = stream.running_gaps
    rest = list(stream.gaps)
    for gap in running:
        rest.remove(gap)
    return rest, running


def summarize(streams: Sequence[Stream]) -> Figures:
    """Gaps by kind, and the time per token of those that were swapped and of the others."""
    parts = [split(stream) for stream in streams]
    pauses = [1e3 * gap for pair in parts for gap in pair[0]]
    running = [1e3 * gap for pair in parts for gap in pair[1]]
    complete = sum(stream.is_complete for stream in streams)
    tpots = {was: [stream.tpot for stream in streams if stream.was_paused is was] for was in (True, False)}
    return {
        "requests": len(streams),
        "completed": complete,
        "done": f"{complete}/{len(streams)}",
        "errors": sorted({stream.error for stream in streams if stream.error}),
        "swapped": len(tpots[True]),
        **spread("bystander_gap_ms", running),
        **spread("pause_ms", pauses),
        "swapped_tpot_p50_s": percentile(tpots[True], 0.5),
        "other_tpot_p50_s": percentile(tpots[False], 0.5),
        "samples": {"bystander_gap_ms": running, "pause_ms": pauses},
    }


def configs(options: argparse.Namespace) -> dict[str, EngineConfig]:
    """The engine of each mode."""
    each = -(-(options.prompt_tokens + options.max_new_tokens) // options.block_size)
    need, least = each * options.concurrency, -(-options.max_cache // options.block_size)
    common = {"preemption": "swap", "max_running": max(2, options.concurrency)}
    roomy = max(2 * need, least)
    longest = min(options.max_cache, each * options.block_size)
    return {
        "calm": config_of(options, **common, num_blocks=roomy),
        "storm": config_of(options, **common, num_blocks=roomy, swap_every=options.swap_every),
        "tight": config_of(options, **common, num_blocks=max(need // 2, each), max_cache=longest),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, max_new_tokens=64)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--swap-every", type=int, default=8, help="steps, in `storm`")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    options = checked(parser, arguments)
    if not 1 <= options.prompt_tokens <= options.max_cache - options.max_new_tokens:
        parser.error(f"--prompt-tokens {options.prompt_tokens} and --max-new-tokens don't fit in --max-cache")
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"no such mode: {', '.join(sorted(unknown))}; there are: {', '.join(MODES)}")
    if options.concurrency < 2:
        parser.error("--concurrency is out of range: from 2, or nobody is a bystander")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    found: list[Figures] = []
    for mode in options.modes:
        with engine(configs(options)[mode], options.in_process) as running:
            found.append({"mode": mode} | running.run(lambda client: run_mode(client, options), 3600))
    calm = next((figures for figures in found if figures["mode"] == "calm"), None)
    for figures in found:
        if calm is not None:
            figures["bystander_p99_ratio"] = figures["bystander_gap_ms_p99"] / calm["bystander_gap_ms_p99"]
    print_table(found, COLUMNS)
    save(options, {"modes": found})
    return int(any(figures["completed"] != figures["requests"] for figures in found))


if __name__ == "__main__":
    sys.exit(main())
