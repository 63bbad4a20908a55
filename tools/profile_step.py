"""Where the GPU's time of a decode step goes, kernel by kernel, and how long the host takes to launch it.

    python -m tools.profile_step [--model tests/data/configs/qwen2.5-3b] [--rows 1,32,128] [--context 192]
        [--kv-cache-dtype auto] [--output FILE.json]

Random weights, one process, no scheduler: the same decode rows again and again, as the engine would launch them.
`step` is the time from step to step with two of them in flight; `host` that of the calls that launch one.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from engine_core.cuda_runner import CudaRunner, load_cuda_runner
from engine_core.plan import Row, StepPlan
from protocol.config import EngineConfig
from protocol.messages import SamplingParams
from tools.environment import describe
from tools.local_engine import ROOT

STEPS = 60
SHOWN = ("step", "busy", "host", "upload", "replay", "sample")


def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def wrapper(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = call(*arguments)
        seconds.append(time.perf_counter() - started)
        return result

    return wrapper


def make_plan(rows: int, context: int) -> StepPlan:
    blocks = -(-context // 16)
    params = SamplingParams(temperature=0.0)
    tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(rows)]
    return StepPlan(0, [Row(n, [n], context - 1, table, True, params, 0) for n, table in enumerate(tables)], [])


def measure(runner: CudaRunner, rows: int, context: int) -> dict[str, Any]:
    plan = make_plan(rows, context)
    before = runner.launch(plan)
    steps, host = [], []
    parts: dict[str, list[float]] = {}
    size = next((size for size in runner.graphs if size >= rows), 0)
    graph = runner.graphs[size].graph
    with ExitStack() as patches:
        for name, owner, method in (
            ("upload", runner.inputs, "upload"),
            ("replay", graph, "replay"),
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
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found = kernels[event.name]
            found[0] += event.device_time / 5
            found[1] += 1
    top = sorted(kernels.items(), key=lambda item: -item[1][0])
    return {
        "step_us": median(steps) * 1e6,
        "host_us": median(host) * 1e6,
        **{f"{name}_us": median(times) * 1e6 for name, times in parts.items()},
        "busy_us": sum(found[0] for found in kernels.values()),
        "kernels": [{"name": name, "us": us, "calls": calls / 5} for name, (us, calls) in top],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "tests/data/configs/qwen2.5-3b")
    parser.add_argument("--rows", default="1,32,128")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = [int(number) for number in options.rows.split(",")]
    config = EngineConfig(
        model=str(options.model),
        load_format="dummy",
        device="cuda",
        kv_cache_dtype=options.kv_cache_dtype,
        max_running=max(rows),
        max_cache=max(1024, options.context),
        num_blocks=max(max(rows) * -(-options.context // 16), -(-max(1024, options.context) // 16)),
    )
    runner = load_cuda_runner(config, lambda done, total: None)
    found = {count: measure(runner, count, options.context) for count in rows}
    for count, figures in found.items():
        shown = ", ".join(f"{name} {figures[f'{name}_us']:.0f} us" for name in SHOWN)
        print(f"{count} rows: {shown}")
        for kernel in figures["kernels"][:14]:
            print(f"  {kernel['us']:8.1f} us {kernel['calls']:6.1f} x  {kernel['name'][:90]}")
    if options.output:
        options.output.write_text(json.dumps({"environment": describe(), "rows": found}, indent=1))


if __name__ == "__main__":
    main()
