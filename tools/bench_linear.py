"""One matrix product on the CPU, by how its weight is kept: time as a share of dense bfloat16's in the same run.

    python -m tools.bench_linear [--size 4096] [--matrices 10] [--threads 1] [--iterations 12] [--output FILE.json]

All forms take turns in each iteration, over `--matrices` matrices, so that none stays in a cache; the least time of
each counts. `q8_0` keeps that format's bits: torch has no product for 8-bit groups, so one per group is summed.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kernels.linear import Int4Linear, Int8Linear, Linear, PackedLinear
from kernels.w4_format import W4Weight
from tools.measurement import Column, Figures, print_table, save

ROWS = (1, 2, 4, 8, 32, 128)
DENSE = "bf16"
_BLOCK = 32  # elements of a row with one scale in Q8_0


class Q8Linear:
    """int8 `[out, in]` with a scale per 32 elements of a row."""

    def __init__(self, weight: Tensor) -> None:
        blocks = weight.float().view(len(weight), -1, _BLOCK)
        scales = blocks.abs().amax(-1) / 127
        codes = (blocks / scales[..., None]).round_().to(torch.int8)
        self._codes, self._scales = codes.transpose(0, 1).contiguous(), scales.T.contiguous().bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        total = torch.zeros((len(x), self._codes.shape[1]))
        for part, codes, scales in zip(torch.split(x, _BLOCK, -1), self._codes, self._scales, strict=True):
            total += torch._weight_int8pack_mm(part.contiguous(), codes, scales)
        return total.to(x.dtype)


def four_bit(weight: Tensor, group: int, sorts: bool = False) -> Int4Linear:
    rows, columns = weight.shape
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.full((rows, columns // group), 0.01, dtype=torch.bfloat16)
    order = torch.randperm(columns).int() if sorts else None
    return Int4Linear(W4Weight(codes, scales, None, order, group))


FORMS: dict[str, Callable[[Tensor], Linear]] = {
    DENSE: PackedLinear,
    "int8": Int8Linear,
    "int4, groups of 128": lambda weight: four_bit(weight, 128),
    "int4, groups of 32": lambda weight: four_bit(weight, 32),
    "int4, 128, desc_act": lambda weight: four_bit(weight, 128, sorts=True),
    "q8_0": Q8Linear,
}


def measure(size: int, matrices: int, iterations: int) -> dict[str, dict[int, float]]:
    """Least milliseconds of a product, by form and rows of x."""
    weights = [(torch.randn(size, size) * 0.02).bfloat16() for _ in range(matrices)]
    layers = {name: [make(weight) for weight in weights] for name, make in FORMS.items()}
    best: dict[str, dict[int, float]] = {name: {} for name in layers}
    for iteration in range(iterations):
        for rows in ROWS if iteration < 4 else ROWS[:4]:
            x = torch.randn(rows, size).bfloat16()
            for name, made in layers.items():
                started = time.perf_counter()
                for layer in made:
                    layer(x)
                took = (time.perf_counter() - started) / matrices * 1e3
                best[name][rows] = min(best[name].get(rows, took), took)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of a weight, a multiple of 128")
    parser.add_argument("--matrices", type=int, default=10, help="weights that take turns, so that no cache holds one")
    parser.add_argument("--threads", type=int, default=1, help="torch's")
    parser.add_argument("--iterations", type=int, default=12, help="rounds; the least counts")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    if options.size < 128 or options.size % 128:
        parser.error(f"--size {options.size} is no multiple of 128, the groups of the 4-bit form")
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        best = measure(options.size, options.matrices, options.iterations)
    dense = best[DENSE]
    rows: list[Figures] = [{"name": "bf16, ms"} | {str(n): took for n, took in dense.items()}]
    rows += [
        {"name": name} | {str(n): took / dense[n] for n, took in found.items()}
        for name, found in best.items()
        if name != DENSE
    ]
    columns: list[Column] = [("rows", "name", "s"), *((str(n), str(n), ".2f") for n in ROWS)]
    print_table(rows, columns)
    save(options, {"milliseconds": {name: {str(n): t for n, t in found.items()} for name, found in best.items()}})


if __name__ == "__main__":
    main()
