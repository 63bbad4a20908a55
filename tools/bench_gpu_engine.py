"""The engine's speed with random weights, through the real processes: decode, long contexts, a pool that runs full.

    python -m tools.bench_gpu_engine [--model tests/data/configs/qwen2.5-3b] [--cases one,32,...] [--device cuda]
        [--four-bit 128] [--kv-cache-dtype auto] [--seconds 120] [--no-overlap] [--output FILE.json]

| case | what |
| --- | --- |
| one | 1 stream, 128 in, 128 out: ms between tokens |
| 2, 4, 32, 128 | so many of these at once: tokens/s while all of them decode |
| long | 32 streams with 8,192 tokens before them, a prompt a step: ms between tokens while all decode |
| pressure | 64 x (512 in, 512 out) at once in half of the blocks they need, and a probe of 128 tokens every 0.3 s |
| roomy | the same with room for all |
| calm, storm | 16 streams, and a swap at every step or none: gaps of those that aren't swapped themselves |
| oversubscribed | 160 x (512 in, 512 out) in a quarter of the blocks they need: who finishes |

Greedy, to the last token. Times are those of the client. Each case starts an engine of its own and ends after
`--seconds` at most; `start` is the time from there to the first token.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from frontend.engine_client import EngineClient
from protocol.config import EngineConfig
from tools.environment import describe
from tools.local_engine import ROOT, LocalEngine
from tools.measurement import Figures, make_streams, percentile, run_all
from tools.streams import Stream, fresh_status, run_stream

BLOCK = 16
PROBE_EVERY = 0.3  # seconds
COUNTERS = (
    "steps", "requests_swapped", "requests_resumed", "requests_recomputed", "requests_failed", "kv_cpu_offload_bytes",
    "kv_cpu_reload_blocks",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Of the cases' requests, in tokens; a test makes them small."""

    short: tuple[int, int] = (128, 128)
    long: tuple[int, int] = (8192, 128)  # answers outlast the prompts of the others: a step each
    heavy: tuple[int, int] = (512, 512)
    heavy_streams: int = 64
    oversubscribed_streams: int = 160
    long_streams: int = 32
    bystanders: int = 16
    probe: int = 128


def steady(streams: Sequence[Stream]) -> Figures:
    """While all streams decode: from the last one's first token to the first one's end."""
    begin, end = max(stream.times[0] for stream in streams), min(stream.times[-1] for stream in streams)
    tokens = sum(count for s in streams for at, count in zip(s.times, s.counts, strict=True) if begin < at <= end)
    gaps = [b - a for s in streams for a, b in zip(s.times, s.times[1:], strict=False) if begin <= a and b <= end]
    return {
        "steady tok/s": tokens / (end - begin) if end > begin else float("nan"),
        "ms/token p50": median(gaps) * 1e3 if gaps else float("nan"),
        "ms/token p99": percentile(gaps, 0.99) * 1e3,
    }


def outcome(streams: Sequence[Stream]) -> Figures:
    """Who finished, at which rate, and the longest that anybody had to wait for a token after the first."""
    ends = [stream.times[-1] for stream in streams if stream.times]
    seconds = max(ends, default=float("nan")) - min(stream.submitted for stream in streams)
    return {
        "requests": len(streams),
        "finished": sum(stream.is_complete for stream in streams),
        "errors": sorted({stream.error for stream in streams if stream.error}),
        "tok/s": sum(sum(stream.counts) for stream in streams) / seconds,
        "longest gap ms": max((gap for stream in streams for gap in stream.gaps), default=0.0) * 1e3,
    }


async def decode(client: EngineClient, count: int, lengths: tuple[int, int]) -> Figures:
    streams = make_streams(client, count, lengths)
    await run_all(client, streams)
    return steady(streams) | outcome(streams)


async def probe(client: EngineClient, length: int, found: list[Stream]) -> None:
    """A short request every now and then, until cancelled."""
    running: set[asyncio.Task[Stream]] = set()
    for number in range(1 << 20):
        (stream,) = make_streams(client, 1, (length, 1), seed=1000 + number)
        found.append(stream)
        running.add(asyncio.create_task(run_stream(client, stream)))
        await asyncio.sleep(PROBE_EVERY)


async def heavy(client: EngineClient, count: int, sizes: Sizes, with_probe: bool) -> Figures:
    streams, probes = make_streams(client, count, sizes.heavy), list[Stream]()
    probing = asyncio.create_task(probe(client, sizes.probe, probes)) if with_probe else None
    await run_all(client, streams)
    if probing is None:
        return outcome(streams)
    probing.cancel()
    ttfts = [stream.ttft * 1e3 for stream in probes if stream.times]
    return outcome(streams) | {
        "probes": len(ttfts),
        "probe TTFT ms p50": median(ttfts),
        "probe TTFT ms max": max(ttfts),
    }


async def bystanders(client: EngineClient, sizes: Sizes) -> Figures:
    """Gaps between tokens of requests that run on, whatever is swapped beside them."""
    streams = make_streams(client, sizes.bystanders, sizes.heavy)
    await run_all(client, streams, with_notices=True)
    gaps = [gap for stream in streams for gap in stream.running_gaps]
    return outcome(streams) | {
        "bystander gap ms p50": median(gaps) * 1e3,
        "bystander gap ms p99": percentile(gaps, 0.99) * 1e3,
    }


class Case:
    """One engine, and what is asked of it."""

    def __init__(self, run: Callable[[EngineClient], Awaitable[Figures]], **options: Any) -> None:
        self.run, self.options = run, options


def blocks_of(lengths: tuple[int, int], count: int) -> int:
    return count * -(-sum(lengths) // BLOCK)


def cases(sizes: Sizes) -> dict[str, Case]:
    """All cases by name."""
    need = blocks_of(sizes.heavy, sizes.heavy_streams)
    much = blocks_of(sizes.heavy, sizes.oversubscribed_streams)
    context = max(sum(sizes.short), sum(sizes.heavy)) + BLOCK
    short = {"max_cache": context}
    most = {"max_running": max(sizes.heavy_streams, sizes.oversubscribed_streams) + 8}
    calm = {**short, "num_blocks": 4 * blocks_of(sizes.heavy, sizes.bystanders), "preemption": "swap"}
    return {
        "one": Case(lambda client: decode(client, 1, sizes.short), **short),
        "2": Case(lambda client: decode(client, 2, sizes.short), **short),
        "4": Case(lambda client: decode(client, 4, sizes.short), **short),
        "32": Case(lambda client: decode(client, 32, sizes.short), **short),
        "128": Case(lambda client: decode(client, 128, sizes.short), **short, max_running=128),
        "long": Case(
            lambda client: decode(client, sizes.long_streams, sizes.long),
            max_cache=sum(sizes.long) + BLOCK,
            prefill_chunk_tokens=sizes.long[0],
        ),
        "pressure": Case(
            lambda client: heavy(client, sizes.heavy_streams, sizes, True), **short, **most, num_blocks=need // 2
        ),
        "roomy": Case(
            lambda client: heavy(client, sizes.heavy_streams, sizes, True), **short, **most, num_blocks=2 * need
        ),
        "calm": Case(lambda client: bystanders(client, sizes), **calm),
        "storm": Case(lambda client: bystanders(client, sizes), **calm, swap_every=1),
        "oversubscribed": Case(
            lambda client: heavy(client, sizes.oversubscribed_streams, sizes, False),
            **short, **most, num_blocks=much // 4, max_cpu_offload_mb=16384,
        ),
    }  # fmt: skip


def measure(case: Case, base: EngineConfig, seconds: float) -> Figures:
    """Start an engine, warm it up with one request, run the case."""
    config = msgspec.structs.replace(base, **case.options)

    async def scenario(client: EngineClient) -> Figures:
        (first,) = make_streams(client, 1, (32, 8), seed=99)
        await run_stream(client, first)
        begun = first.times[0] - started if first.times else float("nan")
        before = (await fresh_status(client)).counters
        figures = await case.run(client)
        after = (await fresh_status(client)).counters
        counts = {name: after[f"{name}_total"] - before[f"{name}_total"] for name in (*COUNTERS, "step_seconds")}
        step = {"ms/step": counts.pop("step_seconds") * 1e3 / max(1, counts["steps"])}
        return figures | {name: int(count) for name, count in counts.items()} | step | {"start s": begun}

    with tempfile.TemporaryDirectory(prefix="pt-") as directory:
        started = time.monotonic()
        engine = LocalEngine(Path(directory), config)
        try:
            return dict(engine.run(scenario, seconds))
        except (TimeoutError, ConnectionError, RuntimeError) as error:
            return {"failed": f"{type(error).__name__} {error}"}
        finally:
            engine.stop()


def in_four_bits(model: Path, group: int, folder: Path) -> Path:
    """A folder with the config of `model`, and 4-bit linear weights in groups of `group`."""
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True
    }  # fmt: skip
    made = folder / f"{model.name}-w4-g{group}"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config))
    return made


def shown(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "tests/data/configs/qwen2.5-3b", help="has a config.json")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--four-bit", type=int, default=0, metavar="GROUP", help="dummy weights in 4 bits, W4A16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cases", help="names with commas between; the default is all")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--prefill-chunk-tokens", type=int, default=EngineConfig(model="").prefill_chunk_tokens)
    parser.add_argument("--max-pause", type=float, default=EngineConfig(model="").max_pause)
    parser.add_argument("--max-cpu-offload-mb", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=120.0, help="a case takes at most, beside its start")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--record", type=Path, metavar="DIR", help="`pagetide serve --record` of each case")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    names = list(cases(Sizes()))
    options.cases = [name.strip() for name in options.cases.split(",")] if options.cases else names
    if unknown := set(options.cases) - set(names):
        parser.error(f"no such case: {', '.join(unknown)}; there are: {', '.join(names)}")
    return options


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        if options.four_bit:
            options.model = in_four_bits(options.model, options.four_bit, Path(folder))
        return run(options)


def run(options: argparse.Namespace) -> int:
    """The exit code: 1 if a case failed."""
    base = EngineConfig(
        model=str(options.model),
        load_format=options.load_format,
        device=options.device,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        max_cpu_offload_mb=options.max_cpu_offload_mb,
        overlap=options.overlap,
        max_pause=options.max_pause,
        prefill_chunk_tokens=options.prefill_chunk_tokens,
    )
    figures: dict[str, Figures] = {}
    for name in options.cases:
        case = cases(Sizes())[name]
        if options.record:
            options.record.mkdir(parents=True, exist_ok=True)
            case.options["record"] = str(options.record / f"{name}.record")
        figures[name] = measure(case, base, options.seconds)
        print(f"{name:16}" + ", ".join(f"{key} {shown(value)}" for key, value in figures[name].items()), flush=True)
        if options.output:  # after each, as the next may not end
            config = msgspec.structs.asdict(msgspec.structs.replace(base, model=options.model.name))
            described = {"environment": describe(), "config": config, "cases": figures}
            options.output.write_text(json.dumps(described, indent=1))
    return int(any("failed" in found for found in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())
