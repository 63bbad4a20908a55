"""Speed by concurrency, over the real processes: tokens/s, time to first token, time per output token.

    python -m tools.bench_paged_scheduler [--checkpoint MODEL] [--backend w4a16] [--kv-cache-dtype fp8] [--device cuda]
        [--concurrency 1,2,4] [--max-cache 256] [--max-new-tokens 16] [--prefill-chunk-tokens 32] [--prompt-tokens 64]
        [--no-prefix-cache] [--iterations 3] [--bandwidth GB/s] [--in-process] [--output FILE.json]

One engine; at each level so many requests come at once, `--iterations` times, with distinct prompts, greedy, EOS
ignored. Times are the client's: client -> tokenizer -> core -> detokenizer -> client. TPOT is from each token to the
next, over all requests of a level. tokens/s: all tokens by the time from the first submit to the last token, median of
iterations.

With `--bandwidth`, the device's in GB/s, a last column says which share of its floor a level's median TPOT reaches: the
time that reading the weights once takes. For a GPU: a CPU may keep weights in two forms and read one of them.
"""

import argparse
import sys
from collections.abc import Sequence
from statistics import median

from frontend.engine_client import EngineClient
from tools.measurement import (
    Column,
    Figures,
    checked,
    config_of,
    engine,
    make_streams,
    numbers,
    parser_of,
    percentile,
    print_table,
    run_all,
    save,
    token_times,
)
from tools.streams import Stream, fresh_status

COLUMNS: list[Column] = [
    ("concurrency", "concurrency", "d"),
    ("done", "done", "s"),
    ("tokens/s", "tokens_per_second", ".2f"),
    ("TTFT p50 s", "ttft_p50_s", ".3f"),
    ("TPOT p50 s", "tpot_p50_s", ".4f"),
    ("TPOT p95-p50 s", "tpot_p95_minus_p50_s", ".4f"),
    ("of the floor", "share_of_floor", ".0%"),
]
Floor = float  # seconds; 0: not known


async def run_level(client: EngineClient, concurrency: int, options: argparse.Namespace, floor: Floor) -> Figures:
    """One level's figures, raw samples included."""
    rounds: list[list[Stream]] = []
    for number in range(options.iterations):
        lengths = (options.prompt_tokens, options.max_new_tokens)
        rounds.append(make_streams(client, concurrency, lengths, seed=1000 * concurrency + number))
        await run_all(client, rounds[-1])
    return summarize(concurrency, rounds, floor)


def summarize(concurrency: int, rounds: Sequence[Sequence[Stream]], floor: Floor = 0.0) -> Figures:
    """What a level's streams amount to."""
    streams = [stream for streams in rounds for stream in streams]
    speeds = []
    for some in rounds:
        ended = max((stream.times[-1] for stream in some if stream.times), default=float("nan"))
        speeds.append(sum(sum(stream.counts) for stream in some) / (ended - min(stream.submitted for stream in some)))
    times, ttfts = token_times(streams), [stream.ttft for stream in streams]
    complete = sum(stream.is_complete for stream in streams)
    tpot = percentile(times, 0.5)
    return {
        "concurrency": concurrency,
        "requests": len(streams),
        "completed": complete,
        "done": f"{complete}/{len(streams)}",
        "errors": sorted({stream.error for stream in streams if stream.error}),
        "tokens_per_second": median(speeds),
        "ttft_p50_s": percentile(ttfts, 0.5),
        "tpot_p50_s": tpot,
        "tpot_p95_minus_p50_s": percentile(times, 0.95) - tpot,
        "samples": {"tokens_per_second": speeds, "ttft_s": ttfts, "tpot_s": times},
    } | ({"share_of_floor": floor / tpot} if floor else {})


async def sweep(client: EngineClient, options: argparse.Namespace) -> Figures:
    """All levels, after a request that isn't counted, and the bytes of the weights."""
    await run_all(client, make_streams(client, 1, (options.prompt_tokens, 2), seed=99))
    weights = (await fresh_status(client)).memory.get("weights", 0)
    floor = weights / (options.bandwidth * 1e9) if options.bandwidth else 0.0
    levels = [await run_level(client, concurrency, options, floor) for concurrency in options.concurrency]
    return {"weights_bytes": weights, "levels": levels}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, prefill_chunk_tokens=32)
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4], help="levels, with commas between")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--bandwidth", type=float, default=0.0, help="of the device's memory, GB/s")
    options = checked(parser, arguments)
    if not 1 <= options.prompt_tokens <= options.max_cache - options.max_new_tokens:
        parser.error(f"--prompt-tokens {options.prompt_tokens} and --max-new-tokens don't fit in --max-cache")
    if min(options.concurrency) < 1:
        parser.error("--concurrency is out of range: from 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    config = config_of(options, max_running=max(options.concurrency))
    with engine(config, options.in_process) as running:
        figures = running.run(lambda client: sweep(client, options), 3600)
    print_table(figures["levels"], COLUMNS)
    save(options, figures)
    return int(any(level["completed"] != level["requests"] for level in figures["levels"]))


if __name__ == "__main__":
    sys.exit(main())
