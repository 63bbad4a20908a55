"""Time linear layers with 4-bit weights beside cuBLAS in bfloat16 and torch's int4 product.

Times are medians of graph replays; each graph rotates over weights that together exceed the L2 cache five times.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kernels.cuda_linear_w4 import W4Linear, all_variants
from kernels.launcher import build_for, probe
from kernels.w4_format import W4Weight
from kernels.w4_packed import PackedW4, pack
from tools.bench_kernels import copy_bandwidth, time_calls
from tools.environment import describe

DEVICE = torch.device("cuda")
L2_TIMES_FIVE = 320 << 20
# model: layer: input features, outputs
SHAPES = {
    "7b": {"qkv": (3584, 4608), "o": (3584, 3584), "gate_up": (3584, 37888), "down": (18944, 3584)},
    "3b": {"qkv": (2048, 2560), "o": (2048, 2048), "gate_up": (2048, 22016), "down": (11008, 2048)},
    "8b": {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)},
}
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOST_INT4_TOKENS = 32  # torch's grows with every token


def make_weight(columns: int, rows: int, group: int, zeros: bool, dtype: torch.dtype) -> PackedW4:
    shape = rows, columns // group
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=DEVICE)
    scales = (torch.rand(shape, device=DEVICE) * 0.01 + 0.002).half()
    points = torch.randint(0, 16, shape, dtype=torch.uint8, device=DEVICE) if zeros else None
    return pack(W4Weight(codes, scales, points, None, group), dtype)


def time_each(product: Callable[[torch.Tensor, Any], object], x: torch.Tensor, weights: list[Any]) -> dict[str, float]:
    """Over all weights, at least 20 calls, so that a replay's start does not count."""
    calls: list[Callable[[], Any]] = [lambda w=w: product(x, w) for w in weights]  # type: ignore[misc]
    return time_calls(calls * max(1, -(-20 // len(calls))))


def measure(
    shape: tuple[int, int],
    tokens: tuple[int, ...],
    group: int = 128,
    zeros: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    peers: bool = False,
) -> list[dict[str, Any]]:
    """One row per number of tokens."""
    columns, rows = shape
    size = rows * columns // 2
    linears = [W4Linear(make_weight(*shape, group, zeros, dtype)) for _ in range(max(1, -(-L2_TIMES_FIVE // size)))]
    read = sum(t.numel() * t.element_size() for t in (linears[0].weight.codes, linears[0].weight.records))
    dense = [
        torch.randn(rows, columns, device=DEVICE, dtype=dtype) for _ in range(len(linears) // 4 + 1 if peers else 0)
    ]
    found = []
    for n in tokens:
        x = torch.randn(n, columns, device=DEVICE).to(dtype)
        row: dict[str, Any] = {"tokens": n, "in": columns, "out": rows, "group": group, "zeros": zeros}
        row["dtype"] = str(dtype).removeprefix("torch.")
        row |= time_each(lambda x, linear: linear(x), x, linears)
        moved = read + 2 * n * (columns + rows)
        row |= {"TB/s": moved / row["us"] / 1e6, "TFLOP/s": 2 * n * rows * columns / row["us"] / 1e6}
        if dense:
            row["cublas_us"] = time_each(F.linear, x, dense)["us"]
            if n <= MOST_INT4_TOKENS:
                row["torch_int4_us"] = torch_int4(x, rows, len(linears))
        found.append(row)
    return found


def torch_int4(x: torch.Tensor, rows: int, count: int) -> float:
    """`_weight_int4pack_mm`, group 128."""
    columns = x.shape[1]
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=DEVICE)
    packed = [torch.ops.aten._convert_weight_to_int4pack(codes, 8) for _ in range(count)]
    factors = torch.rand(columns // 128, rows, 2, device=DEVICE).to(x.dtype)
    return time_each(lambda x, w: torch.ops.aten._weight_int4pack_mm(x, w, 128, factors), x, packed)["us"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--models", default="7b,3b,8b", help="of 7b, 3b, 8b")
    options = parser.parse_args()
    probe(0)
    build_for(all_variants(), 0)
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth:.2f} TB/s")
    results = []

    def add(name: str, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            results.append({"layer": name} | row | {"of copy": row["TB/s"] / bandwidth})
            peers = "  ".join(f"{k} {row[k]:7.2f}" for k in ("cublas_us", "torch_int4_us") if k in row)
            print(
                f"{name:12} {row['dtype']:8} g{row['group']:<4} {'zeros' if row['zeros'] else '':5} {row['tokens']:4} "
                f"{row['us']:7.2f} us {row['TB/s']:5.2f} TB/s {row['TFLOP/s']:6.1f} TFLOP/s  {peers}",
                flush=True,
            )

    for model in options.models.split(","):
        for layer, shape in SHAPES[model].items():
            add(f"{model} {layer}", measure(shape, TOKENS if model == "7b" else (1, 8, 32, 128), peers=model == "7b"))
    gate_up = SHAPES["7b"]["gate_up"]
    for group, zeros, dtype in ((128, True, torch.bfloat16), (32, True, torch.bfloat16), (128, False, torch.float16)):
        add("7b gate_up", measure(gate_up, (1, 16, 64), group, zeros, dtype))
    if options.output:
        report = describe() | {"copy_TB/s": bandwidth, "results": results}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
