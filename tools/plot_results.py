"""Draw what docs/results holds: one PNG for each kind of measurement, beside its JSON.

    python -m tools.plot_results [--folder docs/results] [kernels|w4|engine|concurrency ...]

| picture | of |
| --- | --- |
| kernels-h200.png | kernels-h200.json: decode attention as a share of the copy bandwidth, prefill in TFLOP/s |
| w4-h200.png | w4-h200.json: 4-bit layers, cuBLAS with 16-bit weights and torch's int4, by tokens |
| engine-h200.png | engine-h200.json and vllm-h200.json: a pool for half of the work |
| concurrency.png | article-*/concurrency-*.json: tokens/s and time per token by concurrency |
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # after the choice of a backend without a screen
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tools.local_engine import ROOT

Results = dict[str, Any]
_DECODE_KEYS = "op", "k", "v", "model", "batch", "context"
FORMATS = ("bf16", "int8", "e4m3", "e5m2", "e4m3_scaled")
DPI = 80


def read(path: Path) -> Results:
    return dict(json.loads(path.read_text()))


def bars(axis: Axes, groups: Sequence[str], series: dict[str, Sequence[float | None]]) -> None:
    """Bars side by side for each group, one for each series; None: no bar."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        known = [(place, value) for place, value in enumerate(values) if value is not None]
        places = [place + (number - (len(series) - 1) / 2) * width for place, _ in known]
        axis.bar(places, [value for _, value in known], width, label=name)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def plot_kernels(folder: Path) -> pyplot.Figure:
    found = read(folder / "kernels-h200.json")
    rows = found["rows"]
    figure, (decode, prefill) = pyplot.subplots(1, 2, figsize=(13, 4), width_ratios=(3, 1), layout="constrained")
    shapes = {"gqa8": "32/4 heads", "3b": "Qwen2.5-3B", "7b": "Qwen2.5-7B", "8b": "Llama-3.1-8B"}
    cases = [
        ("gqa8", 128, 8192), ("gqa8", 32, 8192), ("gqa8", 32, 1024), ("gqa8", 1, 8192),
        ("3b", 32, 8192), ("7b", 32, 8192), ("8b", 32, 8192),
    ]  # fmt: skip

    def share(op: str, kv_format: str, case: tuple[str, int, int]) -> float | None:
        wanted = op, kv_format, kv_format, *case
        found = (row for row in rows if tuple(row.get(key) for key in _DECODE_KEYS) == wanted)
        return next((row["of_copy"] * 100 for row in found), None)

    series = {f"here, {name}": [share("decode", name, case) for case in cases] for name in FORMATS}
    series["cuDNN, contiguous bf16"] = [share("decode, cuDNN contiguous", "bf16", case) for case in cases]
    bars(decode, [f"{shapes[model]}\n{batch} x {context >> 10}k" for model, batch, context in cases], series)
    decode.axhline(100, color="black", linewidth=0.8, linestyle=":")
    decode.set_ylabel("% of the copy bandwidth")
    decode.set_title(f"Paged decode attention, {found['environment']['gpu']}: bytes of KV read", fontsize=10)
    decode.set_ylim(0, 130)
    decode.legend(fontsize=7, ncol=6, loc="upper center")
    whole = [row for row in rows if row["op"].startswith("prefill") and row["tokens"] == row["context"] == 8192]
    ways = {"": "here", "CUDNN_ATTENTION contiguous": "cuDNN", "FLASH_ATTENTION contiguous": "torch's flash"}
    kinds = [row["op"].removeprefix("prefill").removeprefix(", ") for row in whole]
    names = [f"{ways.get(kind, kind)}, {row.get('k', 'bf16')}" for kind, row in zip(kinds, whole, strict=True)]
    prefill.barh(names[::-1], [row["TFLOP/s"] for row in whole][::-1], color="C0")
    prefill.set_title("Causal prefill of 8k, TFLOP/s", fontsize=10)
    prefill.tick_params(labelsize=7)
    prefill.grid(axis="x", alpha=0.3)
    return figure


def plot_w4(folder: Path) -> pyplot.Figure:
    found = read(folder / "w4-h200.json")
    layers = ("7b gate_up", "7b down", "7b qkv")
    figure, axes = pyplot.subplots(1, len(layers), figsize=(13, 3.8), layout="constrained")
    for axis, layer in zip(axes, layers, strict=True):
        rows = [
            row for row in found["results"]
            if (row["layer"], row["group"], row["zeros"], row["dtype"]) == (layer, 128, False, "bfloat16")
        ]  # fmt: skip
        tokens = [row["tokens"] for row in rows]
        axis.plot(tokens, [row["us"] for row in rows], marker="o", label="here, W4A16 g128")
        axis.plot(tokens, [row["cublas_us"] for row in rows], marker="s", label="cuBLAS, 16-bit weights")
        few = [(row["tokens"], row["torch_int4_us"]) for row in rows if row.get("torch_int4_us")]
        if few:
            axis.plot(*zip(*few, strict=True), marker="^", label="torch int4")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xticks(tokens, map(str, tokens), fontsize=8)
        axis.set_title(f"{layer}: {rows[0]['in']} x {rows[0]['out']}, us", fontsize=10)
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    return figure


def plot_engine(folder: Path) -> pyplot.Figure:
    theirs = read(folder / "vllm-h200.json")
    engines = {
        "here": read(folder / "engine-h200.json")["cases"]["pressure"],
        theirs["engine"]: theirs["cases"]["pressure"],
        f"{theirs['engine']}, CPU tier": theirs["cases"]["pressure, CPU tier"],
    }
    figures = {
        "tok/s": "tokens/s, all in all",
        "longest gap ms": "longest gap of any request, ms",
        "probe TTFT ms p50": "first token of a short request, median, ms",
        "probe TTFT ms max": "the same, longest, ms",
    }
    figure, axes = pyplot.subplots(1, len(figures), figsize=(14, 2.8), layout="constrained", sharey=True)
    for axis, (name, title) in zip(axes, figures.items(), strict=True):
        values = [case[name] for case in engines.values()]
        colors = ["C0" if engine.startswith("here") else "C1" for engine in engines]
        drawn = axis.barh(list(engines), values, color=colors)
        axis.bar_label(drawn, [f"{value:,.0f}" for value in values], fontsize=8, padding=3)
        axis.set_xlim(0, max(values) * 1.25)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8)
    axes[0].invert_yaxis()
    figure.suptitle(
        "64 x (512 in, 512 out) at once in half of the blocks they need, Qwen2.5-3B shape, one H200", fontsize=10
    )
    return figure


def plot_concurrency(folder: Path) -> pyplot.Figure:
    figure, (speed, tpot) = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for path in sorted(folder.glob("article-*/concurrency-*.json")):
        levels = read(path)["levels"]
        machine = {"article-cpu": "CPU, SmolLM2", "article-h200": "H200, 3B W4"}.get(path.parent.name, path.parent.name)
        label = f"{machine}, {path.stem.removeprefix('concurrency-')}"
        at = [level["concurrency"] for level in levels]
        speed.plot(at, [level["tokens_per_second"] for level in levels], marker="o", label=label)
        middle = [level["tpot_p50_s"] * 1e3 for level in levels]
        spread = [level["tpot_p95_minus_p50_s"] * 1e3 for level in levels]
        tpot.errorbar(at, middle, [[0] * len(at), spread], marker="o", capsize=3, label=label)
    for axis, title in ((speed, "tokens/s"), (tpot, "ms per token: median, and up to the 95th percentile")):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("requests at once")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(0)
        axis.grid(alpha=0.3)
    speed.legend(fontsize=8)
    return figure


PLOTS: dict[str, tuple[str, Callable[[Path], pyplot.Figure]]] = {
    "kernels": ("kernels-h200.png", plot_kernels),
    "w4": ("w4-h200.png", plot_w4),
    "engine": ("engine-h200.png", plot_engine),
    "concurrency": ("concurrency.png", plot_concurrency),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PLOTS)}; all if there is none")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "docs/results", help="where the JSON is, and the PNG goes"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(PLOTS):
        parser.error(f"no such picture: {', '.join(sorted(unknown))}; there are: {', '.join(PLOTS)}")
    for name in options.names or PLOTS:
        file, plot = PLOTS[name]
        figure = plot(options.folder)
        figure.savefig(options.folder / file, dpi=DPI)
        pyplot.close(figure)
        print(options.folder / file)


if __name__ == "__main__":
    main()
