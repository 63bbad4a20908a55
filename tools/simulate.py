"""Compare policies for a KV pool that is too small: the real scheduler in virtual time, over traces.

    python -m tools.simulate --trace TRACE [--trace TRACE ...] --output J --plot P.png

A trace is a path (tools/traces.py says of what kinds) or `synthetic`. Its arrivals are scaled so that they take
`--utilisation` of what the machine can do with a pool without end; the blocks that are then in use 95 % of the time are
the demand, and a pool of a half of them is under pressure 2. The longest request always fits. See docs/SIMULATION.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine_core.scheduler import Scheduler
from engine_core.swap import SwapPolicy
from tools.peer_schedulers import RECOMPUTE, AbortLast, RecomputeLast, ReserveAll, WholeSlotSwap
from tools.traces import TraceRequest, read_trace, synthetic_trace
from tools.virtual_engine import EOS, MACHINES, Machine, Tally, VirtualEngine, capacity_of

UNLIMITED = 1 << 20  # blocks
CALIBRATION_REQUESTS = 1500
DEMAND_PERCENTILE = 95


@dataclass(frozen=True)
class Policy:
    """How a pool that is too small is dealt with, and by whom."""

    scheduler: type[Scheduler]
    swap: SwapPolicy
    host: bool = False  # whether there is a host pool
    prefix_cache: bool = True


POLICIES = {
    "pagetide": Policy(Scheduler, SwapPolicy(), True),
    "recompute-last": Policy(RecomputeLast, RECOMPUTE),
    "whole-slot": Policy(WholeSlotSwap, WholeSlotSwap.POLICY, True, False),
    "reserve-all": Policy(ReserveAll, RECOMPUTE),
    "abort": Policy(AbortLast, RECOMPUTE),
}


@dataclass(frozen=True)
class Load:
    """A trace made to fit a machine."""

    name: str
    requests: Sequence[TraceRequest]
    max_tokens: int  # what clients ask for; 0: what they get
    max_context: int
    longest: int  # tokens of the longest request
    demand: int  # blocks


def prepare(name: str, machine: Machine, count: int, utilisation: float, max_context: int) -> Load:
    """Read a trace and make it fit."""
    trace = synthetic_trace(count) if name == "synthetic" else read_trace(Path(name))
    longest = max(request.answer_tokens for request in trace)
    max_tokens = 1 << (longest - 1).bit_length()
    trace = [request for request in trace if request.prompt_tokens + request.answer_tokens < max_context][:count]
    return fit_load(Path(name).stem, trace, machine, utilisation, max_tokens, max_context)


def fit_load(
    name: str, trace: Sequence[TraceRequest], machine: Machine, utilisation: float, max_tokens: int, max_context: int
) -> Load:
    """Scale a trace's arrivals and measure its demand."""
    sample = [replace(request, arrival=0.0) for request in trace[:CALIBRATION_REQUESTS]]
    rate = len(sample) / _run_unlimited(machine, sample, max_tokens, max_context).ended
    factor = len(trace) / (rate * utilisation) / max(trace[-1].arrival - trace[0].arrival, 1e-9)
    start = trace[0].arrival
    trace = [replace(request, arrival=(request.arrival - start) * factor) for request in trace]
    needed = _run_unlimited(machine, trace, max_tokens, max_context).needed
    blocks, seconds = np.array(needed).T
    order = np.argsort(blocks)
    share = np.cumsum(seconds[order]) / seconds.sum()
    demand = int(blocks[order][np.searchsorted(share, DEMAND_PERCENTILE / 100)])
    tokens = max(request.prompt_tokens + request.answer_tokens for request in trace)
    return Load(name, trace, max_tokens, max_context, tokens, demand)


def _run_unlimited(machine: Machine, trace: Sequence[TraceRequest], max_tokens: int, max_context: int) -> Tally:
    scheduler = Scheduler(capacity_of(machine, UNLIMITED, max_context, False), [EOS], RECOMPUTE)
    return VirtualEngine(scheduler, machine, max_tokens, watch=True).run(trace)


def simulate(load: Load, machine: Machine, name: str, pressure: float, host_ratio: float = 4.0) -> dict[str, Any]:
    """One run; its results, times in milliseconds."""
    policy = POLICIES[name]
    blocks = max(int(load.demand / pressure), load.longest // machine.block_size + 2)
    scheduler = policy.scheduler(
        capacity_of(machine, blocks, load.max_context, policy.prefix_cache), [EOS], policy.swap
    )
    scheduler.grow_host(int(blocks * host_ratio) if policy.host else 0)
    engine = VirtualEngine(scheduler, machine, load.max_tokens)
    started = time.perf_counter()
    tally = engine.run(load.requests)
    counts, count = scheduler.counts, len(load.requests)
    return {
        "trace": load.name,
        "policy": name,
        "pressure": pressure,
        "blocks": blocks,
        "requests": count,
        "completion": tally.finished / count,
        "throughput": tally.tokens / tally.ended,
        "ttft_p50": _percentile(tally.ttft, 50),
        "ttft_p99": _percentile(tally.ttft, 99),
        "preempted": _gaps(tally, True),
        "bystanders": _gaps(tally, False),
        "swapped": counts.swapped,
        "recomputed": counts.recomputed,
        "blocks_copied": engine.lanes.blocks,
        "wasted_tokens": tally.wasted_tokens,
        "prefix_hit_tokens": scheduler.prefix_hit_tokens,
        "steps": tally.steps,
        "virtual_seconds": tally.ended,
        "stalled_seconds": tally.stalled,
        "wall_seconds": time.perf_counter() - started,
    }


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(np.asarray(values), percent)) * 1e3 if len(values) else 0.0


def _gaps(tally: Tally, was_preempted: bool) -> dict[str, float]:
    gaps = tally.gaps[was_preempted]
    points = {"p50": 50, "p99": 99, "p99.9": 99.9, "max": 100}
    return {
        "requests": len(tally.longest[was_preempted]),
        **{name: _percentile(gaps, percent) for name, percent in points.items()},
        "longest_p50": _percentile(tally.longest[was_preempted], 50),
        "longest_p99": _percentile(tally.longest[was_preempted], 99),
    }


COLUMNS = (
    "trace            pressure policy          done %    tok/s   TTFT p50      p99 | preempted  gap p50      p99"
    "    p99.9      max | others: p99    p99.9      max | swaps recomputes wasted tok"
)


def row(result: dict[str, Any]) -> str:
    """A line of the table; times in ms."""
    hit, others = result["preempted"], result["bystanders"]
    return (
        f"{result['trace'][:16]:16} {result['pressure']:8g} {result['policy']:14} {result['completion'] * 100:7.2f} "
        f"{result['throughput']:8.0f} {result['ttft_p50']:10.0f} {result['ttft_p99']:8.0f} | {hit['requests']:9.0f} "
        f"{hit['p50']:8.1f} {hit['p99']:8.1f} {hit['p99.9']:8.0f} {hit['max']:8.0f} | {others['p99']:11.1f} "
        f"{others['p99.9']:8.0f} {others['max']:8.0f} | {result['swapped']:5} {result['recomputed']:10} "
        f"{result['wasted_tokens']:10}"
    )


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """A column for each trace, a row for each figure, pressure to the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures: dict[str, Callable[[dict[str, Any]], float]] = {
        "tokens/s of finished requests": lambda r: r["throughput"],
        "requests finished, %": lambda r: r["completion"] * 100,
        "TTFT p99, s": lambda r: r["ttft_p99"] / 1e3,
        "longest gap of a preempted request, p99, s": lambda r: r["preempted"]["longest_p99"] / 1e3,
        "gap p99.9 of the others, ms": lambda r: r["bystanders"]["p99.9"],
        "tokens computed again": lambda r: r["wasted_tokens"],
    }
    traces = list(dict.fromkeys(result["trace"] for result in results))
    grid, axes = pyplot.subplots(
        len(figures), len(traces), figsize=(5 * len(traces), 2.6 * len(figures)), squeeze=False, layout="constrained"
    )
    for column, trace in enumerate(traces):
        for place, (title, value) in enumerate(figures.items()):
            axis = axes[place][column]
            for policy in POLICIES:
                points = [(r["pressure"], value(r)) for r in results if (r["trace"], r["policy"]) == (trace, policy)]
                if points:
                    pressures, values = zip(*sorted(points), strict=True)
                    axis.plot(pressures, values, marker="o", label=policy)
            axis.set_xscale("log", base=2)
            axis.set_xticks([1, 2, 4], ["1x", "2x", "4x"])
            axis.set_ylim(0, axis.get_ylim()[1] * 1.1)
            axis.set_title(f"{trace}: {title}", fontsize=9)
    axes[0][0].legend(fontsize=8)
    grid.savefig(path, dpi=80)


def _run(arguments: tuple[Load, Machine, str, float, float]) -> dict[str, Any]:
    return simulate(*arguments)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.simulate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--trace", action="append", required=True)
    parser.add_argument("--machine", choices=MACHINES, default="h200-3b")
    parser.add_argument("--requests", type=int, default=10_000, help="of each trace at most")
    parser.add_argument("--pressure", type=float, nargs="+", default=[1, 2, 4], help="demand over the pool's size")
    parser.add_argument("--policy", choices=POLICIES, nargs="+", default=list(POLICIES))
    parser.add_argument("--utilisation", type=float, default=0.7, help="load, as a share of what the machine can do")
    parser.add_argument("--host-ratio", type=float, default=4.0, help="host pool over device pool")
    parser.add_argument("--max-context", type=int, default=32_768, help="longer requests are left out")
    parser.add_argument("--block-size", type=int, default=16, help="tokens; larger ones are quicker to simulate")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--output", type=Path, help="results as JSON")
    parser.add_argument("--plot", type=Path, help="results as PNG")
    options = parser.parse_args(arguments)
    machine = MACHINES[options.machine].with_block_size(options.block_size)
    results = []
    with ProcessPoolExecutor(options.jobs) as executor:
        prepared = [
            executor.submit(prepare, name, machine, options.requests, options.utilisation, options.max_context)
            for name in options.trace
        ]
        loads = [future.result() for future in prepared]
        runs = [
            (load, machine, policy, pressure, options.host_ratio)
            for load in loads
            for pressure in options.pressure
            for policy in options.policy
        ]
        print(COLUMNS)
        for result in executor.map(_run, runs):
            results.append(result)
            print(row(result), flush=True)
    if options.output:
        conditions = {key: value for key, value in vars(options).items() if key not in ("output", "plot", "jobs")}
        conditions["trace"] = [Path(name).name for name in options.trace]
        document = {"conditions": conditions, "machine": asdict(machine), "results": results}
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot:
        plot(results, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
