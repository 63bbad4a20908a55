"""The same overload on the real engine and in the simulator: how well does the simulator predict?

    python -m tools.overload_study [--checkpoint MODEL] [--device cpu] [--requests 80] [--pressures 1,2,4]
        [--utilisation 0.7] [--iterations 3] [--prompts 24,200] [--answers 32,96] [--output FILE.json] [--plot FILE.png]

1. **Rates.** A calibration load on the real engine is recorded; tools/fit_machine.py makes a cost model of it. Again
   before each pressure; the simulator gets the fit of all. The runs are recorded, too: `refitted` is the simulator with
   the rates of the very run that it is held against. So what is left there is the simulator's error, and what
   `simulated` has beyond that is the machine's, which was faster or slower than when it was calibrated.
2. **Load.** Poisson arrivals that take `--utilisation` of what the machine does with a pool without end. The blocks
   then in use 95 % of the time are the demand; a pool of a half of them is pressure 2. The longest request always fits.
3. **Runs.** Each load, once per policy, over the real processes (client -> tokenizer -> core -> detokenizer -> client),
   open loop, policies in turn; then in virtual time with the same arrivals, lengths, pools and scheduler:

    enough      blocks for all
    swap        the small pool, `--preemption swap`
    recompute   the small pool, `--preemption recompute`

The error is the median over iterations (each of its own seed) to the real one. Times are the client's, so
the way through the processes is in the real ones only.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from engine_core.scheduler import Scheduler
from engine_core.swap import SwapPolicy
from frontend.engine_client import EngineClient
from protocol.config import EngineConfig
from tools.fit_machine import Samples, fit, read_samples
from tools.local_engine import run_with
from tools.measurement import (
    PREFIX,
    Column,
    Figures,
    checked,
    config_of,
    engine,
    numbers,
    parser_of,
    percentile,
    print_table,
    save,
)
from tools.simulate import Load, fit_load
from tools.streams import Stream, fresh_status, run_stream
from tools.traces import TraceRequest
from tools.virtual_engine import EOS, Machine, VirtualEngine, capacity_of

POLICIES = {"enough": "auto", "swap": "swap", "recompute": "recompute"}  # --preemption
VIRTUAL = ("simulated", "refitted")
LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # requests of the calibration, so many within a second
STAGGER = 0.1  # seconds between them: prefills meet decodes
SECONDS = 3600  # of a run at most
METRICS = {
    "tokens_per_second": ("tokens/s", ".1f"),
    "ttft_p50_s": ("TTFT p50 s", ".3f"),
    "ttft_p95_s": ("TTFT p95 s", ".3f"),
    "longest_gap_p95_s": ("longest gap p95 s", ".3f"),
    "longest_gap_max_s": ("max", ".3f"),
    "swaps": ("swaps", ".0f"),
    "recomputes": ("recomputes", ".0f"),
    "preempted": ("preempted", ".0f"),
}


def summarize(seconds: float, tokens: int, ttft: Sequence[float], longest: Sequence[float], **counts: int) -> Figures:
    """One run's figures, real or virtual."""
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p95_s": percentile(ttft, 0.95),
        "longest_gap_p95_s": percentile(longest, 0.95),
        "longest_gap_max_s": max(longest, default=0.0),
        **counts,
    }


# -- what is asked ---------------------------------------------------------------------------------------------------


def toy_trace(options: argparse.Namespace, seed: int) -> list[TraceRequest]:
    """Poisson arrivals, one a second; lengths are uniform; no prompt begins like another."""
    draw, arrival, trace = random.Random(seed), 0.0, list[TraceRequest]()
    for number in range(options.requests):
        trace.append(TraceRequest(number, arrival, draw.randint(*options.prompts), draw.randint(*options.answers)))
        arrival += draw.expovariate(1.0)
    return trace


def streams_of(trace: Sequence[TraceRequest], seed: int, vocab_size: int) -> list[Stream]:
    draw = random.Random(seed)
    return [Stream(draw.choices(range(vocab_size), k=one.prompt_tokens), one.answer_tokens) for one in trace]


def configs(options: argparse.Namespace, blocks: int, folder: Path) -> dict[str, EngineConfig]:
    """The engine of each policy. `blocks` is the small pool; records go to the folder."""
    folder.mkdir()
    most = options.requests * blocks_of(options.max_cache, options.block_size)
    sizes = {name: most if name == "enough" else blocks for name in POLICIES}
    return {
        name: config_of(options, num_blocks=sizes[name], preemption=preemption, record=str(folder / name))
        for name, preemption in POLICIES.items()
    }


def blocks_of(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


# -- the real engine -------------------------------------------------------------------------------------------------


def measure_rates(options: argparse.Namespace, path: Path) -> Samples:
    """Record a load at all levels of concurrency, with a swap every few steps."""
    blocks = 2 * LEVELS[-1] * blocks_of(options.max_cache, options.block_size)
    config = config_of(options, num_blocks=blocks, preemption="swap", swap_every=5, record=str(path))

    async def levels(client: EngineClient) -> None:
        for level in LEVELS:
            trace = [replace(one, arrival=one.number * STAGGER) for one in toy_trace(options, level)[:level]]
            await run_load(client, trace, streams_of(trace, level, client.model.vocab_size))

    with engine(config, options.in_process) as running:
        running.run(levels, SECONDS)
    return read_samples(path)


async def run_load(client: EngineClient, trace: Sequence[TraceRequest], streams: Sequence[Stream]) -> None:
    """Send each at its time, whether others have ended or not."""
    started = time.monotonic()

    async def send(request: TraceRequest, stream: Stream) -> None:
        await asyncio.sleep(started + request.arrival - time.monotonic())
        await run_stream(client, stream)

    await asyncio.gather(*map(send, trace, streams))


async def run_real(client: EngineClient, trace: Sequence[TraceRequest], seed: int) -> Figures:
    """A load's figures. Raises RuntimeError if a request didn't get all of its tokens."""
    streams = streams_of(trace, seed, client.model.vocab_size)
    before = (await fresh_status(client)).counters
    await run_load(client, trace, streams)
    after = (await fresh_status(client)).counters
    if lost := [stream.error or stream.finish.name for stream in streams if not stream.is_complete]:
        raise RuntimeError(f"{len(lost)} requests didn't end well, the first one with: {lost[0]}")
    return summarize(
        max(stream.times[-1] for stream in streams) - min(stream.submitted for stream in streams),
        sum(stream.max_tokens for stream in streams),
        [stream.ttft for stream in streams],
        [max(stream.gaps, default=0.0) for stream in streams],
        swaps=int(after["requests_swapped_total"] - before["requests_swapped_total"]),
        recomputes=int(after["requests_recomputed_total"] - before["requests_recomputed_total"]),
        preempted=sum(stream.was_paused for stream in streams),
    )


async def run_policies(paths: dict[str, Path], loads: Sequence[Load]) -> dict[str, list[Figures]]:
    """All loads, policies in turn, after some requests that aren't counted."""
    clients = {name: await EngineClient.connect(path, 120) for name, path in paths.items()}
    found: dict[str, list[Figures]] = {name: [] for name in clients}
    try:
        for client in clients.values():
            warm = [replace(one, arrival=0.0) for one in loads[0].requests[:4]]
            await run_load(client, warm, streams_of(warm, -1, client.model.vocab_size))
        for seed, load in enumerate(loads):
            for name, client in clients.items():
                found[name].append(await run_real(client, load.requests, seed))
    finally:
        for client in clients.values():
            await client.close()
    return found


# -- the simulator ---------------------------------------------------------------------------------------------------


def run_virtual(machine: Machine, config: EngineConfig, load: Load) -> Figures:
    """The same in virtual time."""
    policy = SwapPolicy(config.preemption, config.max_pause)
    capacity = capacity_of(machine, config.num_blocks, config.max_cache, config.prefix_cache)
    scheduler = Scheduler(capacity, [EOS], policy)
    most = len(load.requests) * blocks_of(config.max_cache, config.block_size)
    scheduler.grow_host(min(most, config.offload_budget // machine.block_bytes))
    tally = VirtualEngine(scheduler, machine, load.max_tokens).run(load.requests)
    return summarize(
        tally.ended - load.requests[0].arrival,
        tally.tokens,
        tally.ttft,
        tally.longest[True] + tally.longest[False],
        swaps=scheduler.counts.swapped,
        recomputes=scheduler.counts.recomputed,
        preempted=len(tally.longest[True]),
    )


# -- both ------------------------------------------------------------------------------------------------------------


def study(options: argparse.Namespace, folder: Path) -> tuple[Machine, list[Figures]]:
    """The machine, and a row for each pressure and policy."""
    samples = measure_rates(options, folder / "0.record")
    loads = [
        fit_load("toy", toy_trace(options, 100 + seed), fit(samples), options.utilisation, 0, options.max_cache)
        for seed in range(options.iterations)
    ]
    demand = int(median(load.demand for load in loads))
    runs: list[tuple[int, str, EngineConfig, list[Figures]]] = []
    for number, pressure in enumerate(options.pressures):
        if number:
            samples.add(measure_rates(options, folder / f"{number}.record"))
        blocks = max(demand // pressure, blocks_of(max(load.longest for load in loads), options.block_size) + 2)
        with ExitStack() as stack:
            engines = configs(options, blocks, folder / str(pressure))
            started = {
                name: stack.enter_context(engine(config, options.in_process)) for name, config in engines.items()
            }
            paths = {name: one.path for name, one in started.items()}
            found = run_with([*started.values()], run_policies(paths, loads))
        runs += [(pressure, name, engines[name], figures) for name, figures in found.items()]
        print(f"{pressure}x: a pool of {blocks} blocks, demand {demand}", flush=True)
    machine = fit(samples)
    rows = []
    for pressure, name, config, real in runs:
        own = fit(read_samples(Path(config.record)))
        figures = {"real": real} | {
            kind: [run_virtual(rates, config, load) for load in loads]
            for kind, rates in (("simulated", machine), ("refitted", own))
        }
        rows.append({"pressure": pressure, "policy": name, "blocks": config.num_blocks} | compare(figures))
    return machine, rows


def compare(samples: dict[str, list[Figures]]) -> Figures:
    """Medians of each kind, and the errors of the virtual ones: shares of the real figure; None if that is 0."""
    row: Figures = {
        kind: {name: median(one[name] for one in runs) for name in METRICS} for kind, runs in samples.items()
    }
    errors = {
        kind: {name: row[kind][name] / value - 1 if value else None for name, value in row["real"].items()}
        for kind in VIRTUAL
    }
    return row | {"errors": errors, "samples": samples}


def errors_of(rows: Sequence[Figures]) -> list[Figures]:
    """The median and the largest error of each metric, and of how many rows."""
    found = []
    for name, (title, _) in METRICS.items():
        line: Figures = {"metric": title}
        for kind in VIRTUAL:
            values = [abs(row["errors"][kind][name]) for row in rows if row["errors"][kind][name] is not None]
            if values:
                line |= {f"{kind}_median": median(values), f"{kind}_largest": max(values), "rows": len(values)}
        found.append(line)
    return found


def report(rows: Sequence[Figures]) -> None:
    columns: list[Column] = [("", "pressure", "s"), ("policy", "policy", "s"), ("", "kind", "s")]
    columns += [(title, name, form) for name, (title, form) in METRICS.items()]
    head = [{"pressure": f"{row['pressure']}x", "policy": row["policy"]} for row in rows]
    kinds = ("real", *VIRTUAL)
    print_table(
        [one | {"kind": kind} | row[kind] for one, row in zip(head, rows, strict=True) for kind in kinds], columns
    )
    print()
    errors: list[Column] = [("error", "metric", "s")]
    errors += [(f"{kind} {what}", f"{kind}_{what}", ".1%") for kind in VIRTUAL for what in ("median", "largest")]
    print_table(errors_of(rows), [*errors, ("rows", "rows", "d")])


def plot(rows: Sequence[Figures], path: Path) -> None:
    """A panel for each metric, pressure to the right; real runs drawn through, virtual ones dashed and dotted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in METRICS if name not in ("recomputes", "preempted")]
    grid, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for axis, name in zip(axes.flat, names, strict=True):
        for place, policy in enumerate(POLICIES):
            some = [row for row in rows if row["policy"] == policy]
            pressures = [row["pressure"] for row in some]
            for kind, line in zip(("real", *VIRTUAL), ("-", "--", ":"), strict=True):
                values = [row[kind][name] for row in some]
                axis.plot(pressures, values, line, marker="o", color=f"C{place}", label=f"{policy}, {kind}")
        axis.set_xscale("log", base=2)
        ticks = sorted({row["pressure"] for row in rows})
        axis.set_xticks(ticks, [f"{pressure}x" for pressure in ticks])
        axis.set_ylim(0, axis.get_ylim()[1] * 1.1)
        axis.set_title(METRICS[name][0] if name != "longest_gap_max_s" else "longest gap of all s", fontsize=9)
    axes.flat[0].legend(fontsize=8)
    grid.savefig(path, dpi=80)
    pyplot.close(grid)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=100, help="of a load")
    parser.add_argument("--pressures", type=numbers, default=[1, 2, 4], help="demand over pool, with commas between")
    parser.add_argument("--utilisation", type=float, default=0.7)
    parser.add_argument("--prompts", type=numbers, default=[24, 200], help="tokens, from and to")
    parser.add_argument("--answers", type=numbers, default=[32, 96], help="tokens, from and to")
    parser.add_argument("--plot", type=Path, help="a picture of the figures")
    options = checked(parser, arguments)
    options.max_cache = max(options.max_cache, options.prompts[-1] + options.answers[-1] + 1)
    if min(options.requests, *options.pressures) < 1 or not options.utilisation > 0:
        parser.error("--requests, --pressures or --utilisation is out of range")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        machine, rows = study(options, Path(folder))
    report(rows)
    save(options, {"machine": asdict(machine), "rows": rows, "errors": errors_of(rows)})
    if options.plot:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
