"""The classic swap experiment, over the real processes: a pool of 3 blocks, and two requests that need all 3.

    python tools/bench_cpu_offload.py [--checkpoint MODEL] [--backend w4a16] [--kv-cache-dtype fp8|...|all]
        [--max-cache 128] [--max-new-tokens 8] [--block-size 16] [--max-cpu-offload-mb 256]
        [--prefill-chunk-tokens 512] [--iterations 5] [--in-process] [--output FILE.json]

Each iteration starts a streaming request A and, on A's first token, submits B: A is swapped out, B runs to its end, A
comes back and goes on. Prompts are distinct in all iterations. The same two requests also run in a pool that holds
both (A alone first, then B, so that steps have the same shapes): `identical` says whether all token ids are equal.

Copy times are those of the copies alone (`cpu_offload_seconds`, `cpu_reload_seconds`), for one direction and one
iteration. TPOT is wall time per token after the first: A's has the whole pause in it. Exits with 1 if anything isn't
as it should be: a request unfinished, a number of swaps or resumes other than one per iteration, other tokens.
"""

import argparse
import asyncio
from statistics import median
from typing import Any

import torch

from frontend.engine_client import EngineClient
from kernels.kv_format import kv_codecs
from tools.measurement import checked, config_of, engine, parser_of, save
from tools.streams import Stream, fresh_status, random_prompts, run_stream

BLOCKS = 3
CALM_BLOCKS = 64
NO_TURNS = 600.0  # seconds; taking turns would swap more than once where 8 tokens take long
COUNTERS = {
    "swaps": "requests_swapped_total",
    "resumes": "requests_resumed_total",
    "recomputes": "requests_recomputed_total",
    "blocks_out": "kv_cpu_offload_blocks_total",
    "blocks_in": "kv_cpu_reload_blocks_total",
    "bytes_out": "kv_cpu_offload_bytes_total",
    "failed_blocks": "kv_cpu_offload_failed_total",
    "rejected": "kv_cpu_offload_rejected_total",
    "copy_out_ms": "cpu_offload_seconds",
    "copy_in_ms": "cpu_reload_seconds",
}
Pair = tuple[Stream, Stream]


def make_pair(number: int, options: argparse.Namespace) -> Pair:
    """Two requests that need exactly 3 blocks each."""
    length = BLOCKS * options.block_size - options.max_new_tokens
    first, second = random_prompts(number, [length, length])
    return Stream(first, options.max_new_tokens), Stream(second, options.max_new_tokens)


async def run_round(client: EngineClient, pair: Pair) -> dict[str, float]:
    """Run the experiment once; what the engine counted meanwhile."""
    first, second = pair
    before = (await fresh_status(client)).counters
    running = asyncio.create_task(run_stream(client, first, with_ids=True))
    await asyncio.wait([running, begun := asyncio.create_task(first.has_begun.wait())], return_when="FIRST_COMPLETED")
    begun.cancel()
    await run_stream(client, second, with_ids=True)
    await running
    after = (await fresh_status(client)).counters
    return {
        name: (after[key] - before[key]) * (1000 if name.endswith("_ms") else 1) for name, key in COUNTERS.items()
    } | {"wall_s": max(first.times[-1:] + second.times[-1:], default=0.0) - first.submitted}


def run_engine(
    options: argparse.Namespace, kv_cache_dtype: str, is_calm: bool
) -> tuple[list[Pair], list[dict[str, float]]]:
    """All iterations in one engine, after one that isn't counted."""
    blocks = CALM_BLOCKS if is_calm else BLOCKS
    config = config_of(
        options,
        kv_cache_dtype=kv_cache_dtype,
        num_blocks=blocks,
        max_running=1 if is_calm else 64,  # so that no step has both, as in the small pool
        max_cache=min(options.max_cache, blocks * options.block_size),
        prefix_cache=False,
        preemption="swap",
    )
    pairs = [make_pair(number, options) for number in range(options.iterations)]

    async def scenario(client: EngineClient) -> list[dict[str, float]]:
        await run_round(client, make_pair(-1, options))
        return [await run_round(client, pair) for pair in pairs]

    with engine(config, options.in_process) as running:
        return pairs, running.run(scenario, 3600)


def measure(options: argparse.Namespace, kv_cache_dtype: str) -> dict[str, Any]:
    """One format: the figures of the small pool, and whether tokens are those of the large one."""
    calm, _ = run_engine(options, kv_cache_dtype, is_calm=True)
    pairs, rounds = run_engine(options, kv_cache_dtype, is_calm=False)
    streams = [stream for pair in pairs for stream in pair]
    expected = [stream for pair in calm for stream in pair]
    first, second = zip(*pairs, strict=True)
    totals = {name: sum(one[name] for one in rounds) for name in ("swaps", "resumes", "recomputes", "rejected")}
    return {
        "kv_cache_dtype": kv_cache_dtype,
        "requests": len(streams),
        "completed": sum(stream.is_complete for stream in streams),
        **{name: int(total) for name, total in totals.items()},
        "identical": all(
            ours.tokens == theirs.tokens and len(ours.tokens) == options.max_new_tokens
            for ours, theirs in zip(streams, expected, strict=True)
        ),
        "each_round": all(one["swaps"] == one["resumes"] == 1 for one in rounds),
        **{name: round(median(one[name] for one in rounds), 4) for name in ("copy_out_ms", "copy_in_ms", "wall_s")},
        **{name: int(sum(one[name] for one in rounds)) for name in ("blocks_out", "blocks_in", "bytes_out")},
        "swapped_tpot_s": [round(stream.tpot, 4) for stream in first],
        "other_tpot_s": [round(stream.tpot, 4) for stream in second],
        "swapped_tpot_p50_s": round(median(stream.tpot for stream in first), 4),
        "other_tpot_p50_s": round(median(stream.tpot for stream in second), 4),
        "swapped_max_gap_s": [round(max(stream.gaps, default=0.0), 4) for stream in first],
        "other_max_gap_s": [round(max(stream.gaps, default=0.0), 4) for stream in second],
        "rounds": rounds,
    }


def report(figures: list[dict[str, Any]]) -> None:
    """The table of the experiment, one line per format."""
    print(
        f"{'KV format':20}{'completed':>10}{'swap/resume':>13}{'copy out':>11}{'copy in':>10}"
        f"{'A TPOT':>10}{'B TPOT':>10}{'A gap':>9}{'wall':>8}  identical"
    )
    for one in figures:
        swaps = f"{one['swaps'] / len(one['rounds']):g}/{one['resumes'] / len(one['rounds']):g}"
        print(
            f"{one['kv_cache_dtype']:20}{one['completed']:>7}/{one['requests']}{swaps:>13}"
            f"{one['copy_out_ms']:>8.2f} ms{one['copy_in_ms']:>7.2f} ms"
            f"{one['swapped_tpot_p50_s']:>8.3f} s{one['other_tpot_p50_s']:>8.3f} s"
            f"{median(one['swapped_max_gap_s']):>7.3f} s{one['wall_s']:>6.2f} s  {one['identical']}"
        )


def parse() -> argparse.Namespace:
    parser = parser_of(
        __doc__, max_cache=128, max_new_tokens=8, max_cpu_offload_mb=256, iterations=5, max_pause=NO_TURNS
    )
    options = checked(parser, None)
    if not 2 <= options.max_new_tokens <= options.block_size:
        parser.error(f"--max-new-tokens {options.max_new_tokens} is out of range: 2 to --block-size")
    if options.max_cache < BLOCKS * options.block_size:
        parser.error(f"--max-cache {options.max_cache} holds no request of {BLOCKS} blocks")
    return options


def main() -> int:
    options = parse()
    names = [options.kv_cache_dtype]
    if names == ["all"]:
        names = ["auto", *(codec.name for codec in kv_codecs(torch.bfloat16)[1:])]
    figures = [measure(options, name) for name in names]
    report(figures)
    summary: dict[str, Any] = {
        name: sum(one[name] for one in figures) for name in ("requests", "completed", "swaps", "resumes")
    } | {"identical": all(one["identical"] for one in figures)}
    save(options, summary | (figures[0] if len(figures) == 1 else {"formats": figures}))
    is_right = summary["requests"] == summary["completed"] and all(one["each_round"] for one in figures)
    return 0 if is_right and summary["identical"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
