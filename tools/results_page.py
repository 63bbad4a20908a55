"""The tables of docs/RESULTS.md, from the figures in docs/results: the article's experiments, its numbers beside ours.

    python -m tools.results_page [--check]

`make bench` and `make bench-gpu` write those figures, with ARGS="--folder docs/results/article-cpu --only
concurrency-fp16,concurrency-fp8,swap-fp16,swap-fp8,jitter" and the same with article-h200. What isn't there is said to
be missing. `--check` writes nothing; exit code 1: the page isn't what the figures say.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine_core.model.config import from_hf
from engine_core.model.weights import expected_shapes
from tools.local_engine import ROOT
from tools.measurement import Figures

PAGE, RESULTS = ROOT / "docs/RESULTS.md", ROOT / "docs/results"
CONFIG = ROOT / "tests/data/configs/qwen2.5-3b/config.json"
GROUP = 128
ARTICLE, CPU, H200 = "RTX 3050, article", "CPU, SmolLM2", "H200"
FOLDERS = {CPU: "article-cpu", H200: "article-h200"}
LINEAR = {"q", "k", "v", "o", "gate", "up", "down"}
RTX_3050 = 192e9  # bytes/s, by its data sheet
# The article's sections 2.7 and 3.9: tokens/s, TTFT p50, TPOT p50, TPOT p95 - p50 (s); of FP16 it gives tokens/s alone.
SWEEP: dict[str, dict[int, tuple[float, ...]]] = {
    "fp16": {1: (11.189,), 2: (17.484,), 4: (22.779,)},
    "fp8": {
        1: (11.089, 0.345, 0.0732, 0.0042), 2: (17.317, 0.513, 0.0730, 0.0059), 4: (22.527, 1.345, 0.1061, 0.1547)
    },
}  # fmt: skip
SWAPS = {
    "fp16": ("10/10", "1/1", "1.46", "0.26", "179 to 186", "71 to 76", "", "", 1.46, 0.26),
    "fp8": ("10/10", "1/1", "1.12", "0.26", "195 to 201", "78 to 82", "", "", 1.12, 0.26),
}
IMAGE_BYTES = {"fp16": 589_824, "fp8": 294_912}  # of a block of Qwen2.5-3B
VALIDATION = {"fp16": ("1.0", "fp16"), "int8": ("1.0", "int8"), "e4m3": ("1.0", "e4m3"), "e5m2": ("0.99999988", "e5m2")}


def weight_bytes(is_w4: bool) -> int:
    """Of Qwen2.5-3B, as a decode step reads them: 16 bits, or linear layers in 4 with a scale and a zero a group."""
    total = 0.0
    for name, shape in expected_shapes(from_hf(json.loads(CONFIG.read_text()))).items():
        each = 2.0
        if is_w4 and name.rpartition(".")[2] in LINEAR:
            each = 0.5 + 2.5 / GROUP
        total += torch.Size(shape).numel() * each
    return int(total)


def load(path: Path) -> Figures | None:
    return json.loads(path.read_text()) if path.exists() else None


def figures_of(machine: str, name: str) -> Figures | None:
    return load(RESULTS / FOLDERS[machine] / f"{name}.json")


def bandwidth(results: Path = RESULTS) -> float:
    """Of the H200, bytes/s: a copy, read and written."""
    found = load(results / "kernels-h200.json")
    return float(found["copy_TB/s"]) * 1e12 if found else float("nan")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def sweep() -> str:
    """Speed by concurrency; the floor is one reading of the weights for each step."""
    rows = []
    for kv, levels in SWEEP.items():
        for level, (speed, *rest) in levels.items():
            floor = weight_bytes(True) / RTX_3050
            rows.append([f"{kv}, c{level}", ARTICLE, *_sweep_cells(speed, *rest, floor=floor, level=level)])
            for machine in FOLDERS:
                found = figures_of(machine, f"concurrency-{kv}")
                if found is None:
                    rows.append([f"{kv}, c{level}", machine, "not measured yet", "", "", "", "", ""])
                    continue
                one = next(one for one in found["levels"] if one["concurrency"] == level)
                keys = ("tokens_per_second", "ttft_p50_s", "tpot_p50_s", "tpot_p95_minus_p50_s")
                floor = found["weights_bytes"] / bandwidth() if machine == H200 else 0.0
                cells = _sweep_cells(*(one[key] for key in keys), floor=floor, level=level)
                rows.append([f"{kv}, c{level}", machine, *cells])
    head = [
        "KV, concurrency",
        "machine",
        "tokens/s",
        "TTFT p50",
        "TPOT p50",
        "p95 - p50",
        "floor / TPOT",
        "floor, all in all",
    ]
    return table(head, rows)


def _sweep_cells(
    speed: float, ttft: float = 0.0, tpot: float = 0.0, spread: float = 0.0, *, floor: float, level: int
) -> list[str]:
    times = [f"{1e3 * value:.1f} ms" if value else "" for value in (ttft, tpot, spread)]
    shares = [f"{floor / tpot:.1%}" if tpot and floor else "", f"{speed / level * floor:.1%}" if floor else ""]
    return [f"{speed:,.1f}", *times, *shares]


def swaps() -> str:
    """The experiment of three blocks."""
    rows = []
    for kv, (*cells, out, back) in SWAPS.items():
        moved = 3 * IMAGE_BYTES[kv] / 1e6  # MB over ms are GB/s
        rows.append([kv, ARTICLE, *map(str, cells), f"{moved / float(out):.1f} / {moved / float(back):.1f}"])
        for machine in FOLDERS:
            found = figures_of(machine, f"swap-{kv}")
            if found is None:
                rows.append([kv, machine, "not measured yet", *[""] * 8])
                continue
            count = len(found["rounds"])
            moved = found["bytes_out"] / count / 1e6
            rows.append([
                kv, machine, f"{found['completed']}/{found['requests']}",
                f"{found['swaps'] / count:g}/{found['resumes'] / count:g}",
                f"{found['copy_out_ms']:.2f}", f"{found['copy_in_ms']:.2f}",
                f"{1e3 * found['swapped_tpot_p50_s']:.1f}", f"{1e3 * found['other_tpot_p50_s']:.1f}",
                f"{1e3 * median(found['swapped_max_gap_s']):.1f}", "equal" if found["identical"] else "DIFFER",
                f"{moved / found['copy_out_ms']:.1f} / {moved / found['copy_in_ms']:.1f}",
            ])  # fmt: skip
    head = ["KV", "machine", "done", "swaps/resumes a round", "copy out ms", "copy in ms", "A's TPOT ms", "B's TPOT ms",
            "A's longest gap ms", "tokens", "GB/s out / in"]  # fmt: skip
    return table(head, rows)


def jitter() -> str:
    """Gaps with and without swaps; the article has no such table."""
    rows = []
    for machine in FOLDERS:
        found = figures_of(machine, "jitter")
        if found is None:
            rows.append([machine, "not measured yet", *[""] * 7])
            continue
        for mode in found["modes"]:
            gaps = [f"{mode[f'bystander_gap_ms_{what}']:.1f}" for what in ("p50", "p95", "p99", "max")]
            pauses = [f"{mode[key]:.0f}" if mode[key] is not None else "" for key in ("pause_ms_p50", "pause_ms_max")]
            rows.append([machine, mode["mode"], mode["done"], str(mode["requests_swapped"]), *gaps, " / ".join(pauses)])
    head = ["machine", "mode", "done", "swaps", "bystanders' gap p50 ms", "p95", "p99", "max", "pause p50 / max ms"]
    return table(head, rows)


def validation() -> str:
    """Paged decode attention against a reference: the lowest cosine of all cases, FP16."""
    found = load(RESULTS / "kernel-validation-h200.json")
    rows = []
    for name, (cosine, kv) in VALIDATION.items():
        some = [row for row in found["rows"] if row["op"] == "decode" and row["k"] == kv] if found else []
        some = [row for row in some if row["dtype"] == "float16"]
        ours = f"{min(row['cosine'] for row in some):.9f}, {len(some)} cases" if some else "not measured yet"
        rows.append([name, cosine, ours])
    return table(["KV", "article: native kernel against torch", "H200: lowest against FP64"], rows)


def engine() -> str:
    """The 3B shape, by requests at once."""
    rows = []
    for file, kind in (("engine-h200", "bf16"), ("engine-w4-h200", "W4")):
        found = load(RESULTS / f"{file}.json") or load(RESULTS / FOLDERS[H200] / file.replace("-h200", ".json"))
        floor = 1e3 * weight_bytes(kind == "W4") / bandwidth()
        if found is None:
            rows.append([kind, "", f"not measured yet; floor {floor:.2f} ms", "", ""])
            continue
        for name in ("one", "2", "4", "32", "128"):
            if "ms/token p50" in (case := found["cases"].get(name, {})):
                time = case["ms/token p50"]
                streams = "1" if name == "one" else name
                speed = f"{case['steady tok/s']:,.0f}"
                rows.append([kind, streams, f"{time:.2f}", speed, f"{floor / time:.0%}"])
    return table(["weights", "streams", "ms/token p50", "steady tokens/s", "of the floor"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "sweep": sweep, "swaps": swaps, "jitter": jitter, "validation": validation, "engine": engine
}  # fmt: skip


def filled(page: str) -> str:
    """The page with its tables as the figures are. Raises KeyError for a table that isn't known."""

    def fill(found: "re.Match[str]") -> str:
        return f"<!-- {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the page is another than the figures give")
    options = parser.parse_args(arguments)
    page: Any = PAGE.read_text()
    if options.check:
        return int(filled(page) != page)
    PAGE.write_text(filled(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
