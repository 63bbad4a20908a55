"""All benchmarks, one after the other, and one summary: `make bench` without a GPU, `make bench-gpu` with one.

    python -m tools.bench [--gpu] [--only NAME,...] [--engine "FLAGS"] [--output FILE.json] [--folder DIR]

Without `--gpu` it is a short form of everything, on the default model: less than ten minutes on two cores. With it, it
is the full form: kernels, copies, loading, the engine with random weights of the 3B shape, in bf16 and in 4 bits, and
the experiments of the article. `--engine` adds flags to those that start an engine, such as "--threads 1". Each one's
own figures go to `--folder`, all of them to `--output`. One that fails is told of and doesn't end the others.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tools.bench_gpu_engine import in_four_bits
from tools.environment import describe
from tools.local_engine import ROOT
from tools.measurement import Column, Figures, print_table

LIMIT = 1800.0  # seconds of one benchmark
GROUP = 128  # of 4-bit weights
W4 = "W4"  # stands for the folder of the 4-bit model
Row = tuple[str, str]  # the figure, what to hold it against
Rows = dict[str, Row]  # by what was measured


@dataclass(frozen=True)
class Run:
    """One benchmark: a module of tools, its flags, and what to say of its figures."""

    tool: str
    flags: str
    rows: Callable[[Figures], Rows]
    is_engine: bool = False  # whether it takes an engine's flags


# -- what is said of each --------------------------------------------------------------------------------------------


def step(found: Figures) -> Rows:
    return {"a step beside the model": (f"{found['total']:.0f} us", f"{found['requests']} requests; goal 1,500 us")}


def start(found: Figures) -> Rows:
    return {"start to first token": (f"{median(one['first token'] for one in found['rounds']):.2f} s", "goal 6 s")}


def api(found: Figures) -> Rows:
    beside = f"goal {found['goal']:,}; {found['ratio']:.2f} x a bare SSE loop"
    return {"streamed by one API server": (f"{found['pagetide']['tokens_per_second']:,} tok/s", beside)}


def peers(found: Figures) -> Rows:
    rows = {}
    for case in dict.fromkeys(row["case"] for row in found["rows"]):
        ours, *others = (row for row in found["rows"] if row["case"] == case)
        beside = ", ".join(f"{row['ratio']:.2f} x {row['engine']}" for row in others)
        rows[f"CPU {case}"] = f"{ours['tokens_per_second']:,.1f} tok/s", beside or "no peer is installed"
    return rows


def concurrency(found: Figures) -> Rows:
    rows = {}
    for level in found["levels"]:
        tpot = level["tpot_p50_s"] or float("nan")  # if all tokens came at once
        times = f"TTFT p50 {level['ttft_p50_s']:.3f} s, TPOT p50 {tpot * 1e3:.1f} ms"
        rows[f"c{level['concurrency']}"] = f"{level['tokens_per_second']:,.1f} tok/s", f"{times}, {level['done']} done"
    return rows


def swap(found: Figures) -> Rows:
    tokens = "tokens equal" if found["identical"] else "tokens DIFFER"
    beside = f"copy in {found['copy_in_ms']:.2f} ms, {found['completed']}/{found['requests']} done, {tokens}"
    return {"one swap, copy out": (f"{found['copy_out_ms']:.2f} ms", beside)}


def jitter(found: Figures) -> Rows:
    rows = {}
    for mode in found["modes"]:
        beside = f"{mode['requests_swapped']} swaps, longest pause {mode['pause_ms_max'] or 0:.0f} ms"
        rows[f"gap of bystanders, {mode['mode']}"] = f"{mode['bystander_gap_ms_p99']:.1f} ms p99", beside
    return rows


def intake(found: Figures) -> Rows:
    beside = f"{found['p99_ratio']:.2f} x without swaps; goal 1.2"
    return {"intake in a swap storm": (f"{found['p99_ms_swapping']:.1f} ms p99", beside)}


def oversubscription(found: Figures) -> Rows:
    rows = {}
    for factor, ways in found["factors"].items():
        for way, one in ways.items():
            beside = f"{one['tokens_per_second']:.0f} tok/s, {one['completed']}/{one['requests']} done; goal 0.9"
            rows[f"{factor}x work, {way}"] = f"{one['ratio']:.2f} x enough", beside
    return rows


def serve(found: Figures) -> Rows:
    beside = f"{found['completed']}/{found['requests']} done, goodput {found['goodput_share']:.0%}"
    return {"HTTP load": (f"{found['tokens_per_second']:,.1f} tok/s", beside)}


def overload(found: Figures) -> Rows:
    rows = {}
    for row in found["rows"]:
        real, error = row["real"], row["errors"]["simulated"]["tokens_per_second"]
        beside = f"longest gap {real['longest_gap_max_s']:.2f} s; the simulator is {error:+.0%} off"
        rows[f"overload {row['pressure']}x, {row['policy']}"] = f"{real['tokens_per_second']:,.1f} tok/s", beside
    return rows


def simulation(found: Figures) -> Rows:
    return {
        f"simulated {one['pressure']:g}x, {one['policy']}": (
            f"{one['throughput']:,.0f} tok/s", f"TTFT p50 {one['ttft_p50']:.0f} ms, {one['completion']:.0%} done"
        )
        for one in found["results"]
    }  # fmt: skip


def copies(found: Figures) -> Rows:
    best = {name: max(row["GB/s"] for row in found["rows"] if row.get("direction") == name) for name in ("out", "in")}
    return {f"copies {name}": (f"{best[name]:.1f} GB/s", f"link {found['link'][name]:.1f}") for name in best}


def copy_bandwidth(found: Figures) -> Rows:
    return {"device copy": (f"{found['copy_TB/s']:.2f} TB/s", f"{len(found.get('rows') or found['results'])} cases")}


def validation(found: Figures) -> Rows:
    failed = sum(not row["passed"] for row in found["rows"])
    return {"kernels against FP64": (f"{failed} failed", f"of {len(found['rows'])}")}


def engine_cases(found: Figures) -> Rows:
    rows = {}
    for name, case in found["cases"].items():
        if "failed" in case:
            rows[name] = "FAILED", case["failed"]
            continue
        speed = case.get("steady tok/s") or case["tok/s"]
        beside = f"longest gap {case['longest gap ms']:.0f} ms, {case['finished']}/{case['requests']} done"
        rows[name] = f"{speed:,.0f} tok/s", beside
    return rows


def loading(found: Figures) -> Rows:
    return {
        f"load {row['format']}, cold": (f"{row['cold_load']:.2f} s", f"{row['cold_ratio']:.2f} x a plain read")
        for row in found["rows"]
    }


def profile(found: Figures) -> Rows:
    return {"profiled steps": (str(len(found["steps"])), "")}


# -- what is run -----------------------------------------------------------------------------------------------------

_SWEEP = "--max-cache 256 --max-new-tokens 16 --prefill-chunk-tokens 32 --no-prefix-cache --kv-cache-dtype"
_FORCED = "--max-cache 128 --max-new-tokens 8 --block-size 16 --max-cpu-offload-mb 256 --kv-cache-dtype"
_W4 = f"--checkpoint {W4} --load-format dummy --backend w4a16 --device cuda"


def article(engine: str = "") -> dict[str, Run]:
    """The article's experiments with its flags."""
    return {
        "concurrency-fp16": Run("bench_paged_scheduler", f"{engine} {_SWEEP} fp16", concurrency, True),
        "concurrency-fp8": Run("bench_paged_scheduler", f"{engine} {_SWEEP} fp8", concurrency, True),
        "swap-fp16": Run("bench_cpu_offload", f"{engine} {_FORCED} fp16", swap, True),
        "swap-fp8": Run("bench_cpu_offload", f"{engine} {_FORCED} fp8", swap, True),
        "jitter": Run("bench_tpot_jitter", engine, jitter, True),
    }


CPU = {
    "step": Run("bench_step", "", step),
    "start": Run("bench_start", "--rounds 2", start),
    "api": Run("bench_api", "--seconds 2", api),
    "peers": Run("bench_cpu_peers", "--iterations 1 --streams 1,8", peers, True),
    **article(),
    "intake": Run("bench_intake", "--submits 60 --iterations 1", intake, True),
    "oversubscription": Run("bench_oversubscription", "--factors 2 --rounds 1", oversubscription),
    "serve": Run("bench_serve", "--requests 24 --shrink 8 --max-new-tokens 64", serve, True),
    "overload": Run("overload_study", "--iterations 1 --requests 40 --pressures 2 --threads 1", overload, True),
    "simulation": Run("simulate", "--trace synthetic --requests 200 --pressure 2", simulation),
}
GPU = {
    "validation": Run("validate_kernels", "", validation),
    "kernels": Run("bench_kernels", "", copy_bandwidth),
    "small-kernels": Run("bench_small_kernels", "", copy_bandwidth),
    "w4": Run("bench_w4", "", copy_bandwidth),
    "copies": Run("bench_copies", "", copies),
    "profile": Run("profile_step", "", profile),
    "load": Run("bench_load", "--device cuda", loading),
    "engine": Run("bench_gpu_engine", "", engine_cases),
    "engine-w4": Run("bench_gpu_engine", f"--four-bit {GROUP} --cases one,2,4,32,128,pressure", engine_cases),
    **article(_W4),
    "intake": Run("bench_intake", _W4, intake, True),
    "serve": Run("bench_serve", f"{_W4} --max-cache 2048 --concurrency 32 --requests 256", serve, True),
    "overload": Run("overload_study", f"{_W4} --requests 400 --prompts 128,1024 --answers 64,256", overload, True),
}


def command_of(run: Run, w4: Path | str, engine: str = "") -> list[str]:
    """A run's module and flags, without its output."""
    flags = [str(w4) if flag == W4 else flag for flag in shlex.split(run.flags)]
    return [f"tools.{run.tool}", *flags, *(shlex.split(engine) if run.is_engine else [])]


def measure(command: Sequence[str], output: Path) -> Figures:
    """Run a benchmark, its own words as they come; its figures. Raises RuntimeError if there are none."""
    print(f"== {' '.join(command)}", flush=True)
    whole = [sys.executable, "-m", *command, "--output", str(output)]
    try:
        code = subprocess.run(whole, cwd=ROOT, check=False, timeout=LIMIT).returncode
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end within {LIMIT:.0f} s") from None
    if not output.exists():
        raise RuntimeError(f"exit code {code}")
    return dict(json.loads(output.read_text())) | ({"exit code": code} if code else {})


def summarize(runs: dict[str, Run], figures: dict[str, Figures]) -> list[Figures]:
    """A line for each figure that says how we stand; of one that failed, why."""
    lines = []
    for name, found in figures.items():
        rows = {name: ("FAILED", found["failed"])} if "failed" in found else _rows(runs[name], name, found)
        lines += [{"run": name, "what": what, "figure": one, "beside": beside} for what, (one, beside) in rows.items()]
        if code := found.get("exit code"):
            lines.append({"run": name, "what": name, "figure": "MISSED", "beside": f"exit code {code}"})
    return lines


def _rows(run: Run, name: str, found: Figures) -> Rows:
    try:
        return run.rows(found)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # others' figures are not to be lost for it
        return {name: ("FAILED", f"its figures are not understood: {error!r}")}


COLUMNS: list[Column] = [("", "run", "s"), ("", "what", "<34"), ("", "figure", "s"), ("", "beside", "<70")]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the full form, on a GPU")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names with commas between")
    parser.add_argument("--engine", default="", help="more flags for those that start an engine")
    parser.add_argument("--output", type=Path, help="write all figures as JSON")
    parser.add_argument("--folder", type=Path, help="write each one's figures there, too")
    options = parser.parse_args(arguments)
    runs = GPU if options.gpu else CPU
    options.only = options.only or list(runs)
    if unknown := set(options.only) - set(runs):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are: {', '.join(runs)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    runs = {name: run for name, run in (GPU if options.gpu else CPU).items() if name in options.only}
    figures: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        w4 = in_four_bits(ROOT / "tests/data/configs/qwen2.5-3b", GROUP, Path(temporary))
        for name, run in runs.items():
            started, output = time.monotonic(), folder / f"{name}.json"
            output.unlink(missing_ok=True)
            try:
                figures[name] = measure(command_of(run, w4, options.engine), output)
            except RuntimeError as error:
                figures[name] = {"failed": str(error)}
            figures[name]["seconds of the benchmark"] = round(time.monotonic() - started, 1)
    return finish(runs, figures, options)


def finish(runs: dict[str, Run], figures: dict[str, Figures], options: argparse.Namespace) -> int:
    """Print the summary and write the figures; 1 if anything failed."""
    environment: dict[str, Any] = describe()
    lines = summarize(runs, figures)
    seconds = sum(found["seconds of the benchmark"] for found in figures.values())
    print(f"== summary, commit {environment['commit'][:10]}, torch {environment['torch']}, {seconds:.0f} s")
    print_table(lines, COLUMNS)
    if options.output:
        report = {"environment": environment, "summary": lines, "figures": figures}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(line["figure"] in ("FAILED", "MISSED") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
