"""The benchmarks that need no GPU, one after the other, and one summary: `make bench`.

python tools/bench.py [--output FILE.json]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tools.environment import describe
from tools.local_engine import ROOT

RUNS = {
    "bench_step": [],
    "bench_start": [],
    "bench_api": [],
    "bench_cpu_peers": ["--iterations", "1"],
}
Row = tuple[str, str, str]  # what, the figure, what to hold it against


def run(name: str, arguments: list[str]) -> Any:
    """Run a benchmark, its own output as it comes; its figures."""
    print(f"== {name}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "figures.json"
        command = [sys.executable, "-m", f"tools.{name}", *arguments, "--output", str(output)]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise SystemExit(f"{name} failed")
        return json.loads(output.read_text())


def summarize(figures: dict[str, Any]) -> list[Row]:
    """One row per figure that says how we stand."""
    step, starts, api, cpu = (figures[name] for name in RUNS)
    rows = [("a step beside the model", f"{step['total']:.0f} us", f"{step['requests']} requests")]
    first = median(one["first token"] for one in starts["rounds"])
    rows.append(("start to first token", f"{first:.2f} s", "goal 6 s"))
    streamed = api["pagetide"]["tokens_per_second"]
    beside = f"goal {api['goal']:,}; {api['ratio']:.2f} x a bare SSE loop"
    rows.append(("streamed by one API server", f"{streamed:,} tok/s", beside))
    for case in dict.fromkeys(row["case"] for row in cpu["rows"]):
        ours, *peers = (row for row in cpu["rows"] if row["case"] == case)
        beside = ", ".join(f"{row['ratio']:.2f} x {row['engine']}" for row in peers)
        rows.append((f"CPU {case}", f"{ours['tokens_per_second']:,.1f} tok/s", beside))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="write all figures as JSON")
    options = parser.parse_args()
    figures = {name: run(name, arguments) for name, arguments in RUNS.items()}
    environment = describe()
    print(f"== summary, commit {environment['commit'][:10]}, torch {environment['torch']}")
    for what, figure, beside in summarize(figures):
        print(f"{what:28}{figure:>16}   {beside}")
    if options.output:
        Path(options.output).write_text(json.dumps({"environment": environment} | figures, indent=1))


if __name__ == "__main__":
    main()
