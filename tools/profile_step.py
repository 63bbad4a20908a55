"""Where the GPU's time of a step goes, kernel by kernel, and how long the host takes to launch it.

    python -m tools.profile_step [--model tests/data/configs/qwen2.5-3b] [--rows 1,32,128] [--context 192]
        [--prefill 512] [--four-bit 128] [--kv-cache-dtype auto] [--trace DIR] [--output FILE.json]

Random weights, one process, no scheduler: the same rows again and again, as the engine would launch them. `--prefill`
adds steps of one chunk of so many tokens. `first` is the time of the first step of its shape, `step` that from step to
step with two of them in flight, `busy` that in which any kernel runs, `host` that of the calls that launch one:
`upload` of the inputs, `forward` (a graph, or every launch), `sample`. Kernels may overlap, the next one waiting for
the end of the one before: a kernel's time is what passes, while it runs, after the one before it has ended. `--trace`
leaves all of them on a timeline, a file a step, for Perfetto or chrome://tracing.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from engine_core.cuda_runner import CudaRunner, load_cuda_runner
from engine_core.plan import Row, StepPlan
from protocol.config import EngineConfig
from protocol.errors import StartupError
from protocol.messages import SamplingParams
from tools.bench_gpu_engine import in_four_bits
from tools.environment import describe
from tools.local_engine import ROOT

STEPS = 60
SHOWN = ("first", "step", "busy", "host", "upload", "forward", "sample")


def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def wrapper(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = call(*arguments)
        seconds.append(time.perf_counter() - started)
        return result

    return wrapper


def shares(intervals: Sequence[tuple[str, float, float]]) -> dict[str, tuple[float, int]]:
    """By name: the time that passes while an interval (name, start, end) lasts and after all others that end before it.

    The sum of all is the time in which there is any. And how many there are.
    """
    found: dict[str, tuple[float, int]] = {}
    last = 0.0
    for name, start, end in sorted(intervals, key=lambda interval: interval[2]):
        time_, count = found.get(name, (0.0, 0))
        found[name] = time_ + end - max(start, last), count + 1
        last = end
    return found


def make_plan(rows: int, context: int) -> StepPlan:
    blocks = -(-context // 16)
    params = SamplingParams(temperature=0.0)
    tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(rows)]
    return StepPlan(0, [Row(n, [n], context - 1, table, True, params, 0) for n, table in enumerate(tables)], [])


def make_chunk(tokens: int) -> StepPlan:
    blocks = list(range(-(-tokens // 16)))
    return StepPlan(0, [], [Row(0, list(range(tokens)), 0, blocks, True, SamplingParams(temperature=0.0), 0)])


def measure(runner: CudaRunner, plan: StepPlan, trace: Path | None = None) -> dict[str, Any]:
    started = time.perf_counter()
    runner.launch(plan).tokens()
    first = time.perf_counter() - started
    before = runner.launch(plan)
    steps, host = [], []
    parts: dict[str, list[float]] = {}
    graph = runner.graphs.get(runner.shape_of(plan))
    forward: tuple[Any, str] = (graph.graph, "replay") if graph else (runner, "_compute")
    with ExitStack() as patches:
        for name, owner, method in (
            ("upload", runner.inputs, "upload"),
            ("forward", *forward),
            ("sample", runner.sampler, "launch"),
        ):
            parts[name] = []
            patches.enter_context(patch.object(owner, method, timed(getattr(owner, method), parts[name])))
        last = time.perf_counter()
        for _ in range(STEPS):
            started = time.perf_counter()
            following = runner.launch(plan)
            host.append(time.perf_counter() - started)
            before.tokens()
            before, now = following, time.perf_counter()
            steps.append(now - last)
            last = now
        before.tokens()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            runner.launch(plan).tokens()
    if trace is not None:
        profile.export_chrome_trace(str(trace))
    kernels = shares(
        [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
    )
    top = sorted(kernels.items(), key=lambda item: -item[1][0])
    return {
        "first_us": first * 1e6,
        "step_us": median(steps) * 1e6,
        "host_us": median(host) * 1e6,
        **{f"{name}_us": median(times) * 1e6 for name, times in parts.items()},
        "busy_us": sum(us for us, _ in kernels.values()) / 5,
        "kernels": [{"name": name, "us": us / 5, "calls": calls / 5} for name, (us, calls) in top],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "tests/data/configs/qwen2.5-3b")
    parser.add_argument("--rows", default="1,32,128")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--prefill", default="", help="tokens of a chunk, with commas between")
    parser.add_argument("--four-bit", type=int, default=0, metavar="GROUP", help="W4A16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="write timelines there")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows, chunks = ([int(number) for number in given.split(",") if number] for given in (options.rows, options.prefill))
    longest = max(1024, options.context, *chunks)
    config = EngineConfig(
        model=str(options.model),
        load_format="dummy",
        device="cuda",
        kv_cache_dtype=options.kv_cache_dtype,
        max_running=max(rows),
        max_cache=longest,
        num_blocks=max(max(rows) * -(-options.context // 16), -(-longest // 16)),
        prefill_chunk_tokens=max(512, *chunks) if chunks else 512,
    )
    with tempfile.TemporaryDirectory() as folder:
        if options.four_bit:
            made = in_four_bits(options.model, options.four_bit, Path(folder))
            config = msgspec.structs.replace(config, model=str(made))
        try:
            runner = load_cuda_runner(config, lambda done, total: None)
        except StartupError as error:
            raise SystemExit(f"error: {error}") from None
    print(runner.summary)
    plans = {f"{count} rows": make_plan(count, options.context) for count in rows}
    plans |= {f"chunk of {count}": make_chunk(count) for count in chunks}
    if options.trace:
        options.trace.mkdir(parents=True, exist_ok=True)
    traces = {name: options.trace / f"{name.replace(' ', '-')}.json" for name in plans} if options.trace else {}
    found = {name: measure(runner, plan, traces.get(name)) for name, plan in plans.items()}
    for name, figures in found.items():
        print(f"{name}: " + ", ".join(f"{part} {figures[f'{part}_us']:.0f} us" for part in SHOWN))
        for kernel in figures["kernels"][:14]:
            print(f"  {kernel['us']:8.1f} us {kernel['calls']:6.1f} x  {kernel['name'][:90]}")
    if options.output:
        options.output.write_text(json.dumps({"environment": describe(), "steps": found}, indent=1))


if __name__ == "__main__":
    main()
