"""Check the CUDA kernels on this machine's GPU against float64 references: one row per op and format."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kernels import cuda_linear_w4
from kernels.compiler import build
from kernels.cuda_attention import DecodeAttention, PrefillAttention, WriteKV
from kernels.cuda_layout import all_variants, plain_layout
from kernels.cuda_linear_w4 import W4Linear
from kernels.launcher import driver_version, probe
from kernels.w4_format import W4Weight
from kernels.w4_packed import pack
from tools.environment import describe
from tools.kv_cases import Case, compare, decode, make_case, reference, rows_of

LEAST_COSINE = 0.99999
DEVICE = torch.device("cuda")
EIGHT_BIT = ("int8", "e4m3", "e5m2", "e4m3_scaled")
PAIRS = [
    (dtype, k, v)
    for dtype, own in ((torch.float16, "fp16"), (torch.bfloat16, "bf16"))
    for k, v in [(own, own), *((f, f) for f in EIGHT_BIT), *((own, f) for f in EIGHT_BIT)]
]


def attend(op: str, case: Case) -> torch.Tensor:
    """Run decode or prefill attention into an output full of NaN."""
    layout, out = case.layout, torch.full_like(case.query, float("nan"))
    kinds = layout.k_format, layout.v_format, case.query.shape[1], layout.num_kv_heads, layout.head_dim
    batch = case.tables, case.lengths, case.query_start
    if op == "decode":
        attention = DecodeAttention(*kinds, case.query.dtype, DEVICE, len(case.lengths), case.most_queries)
        attention.plan(*batch)
        attention(layout, case.pool, case.query, out)
    else:
        attention = PrefillAttention(*kinds, case.query.dtype, DEVICE, portable=op == "prefill, portable")
        attention(layout, case.pool, case.query, out, *batch)
    return out


def attention_rows() -> Iterator[dict[str, Any]]:
    lengths = (1, 15, 16, 17, 127, 129, 1000, 4097, 32768)
    for dtype, k, v in PAIRS:
        for op, heads, kv_heads, counts in (
            ("decode", 16, 2, [1] * len(lengths)),
            ("decode", 28, 4, [min(n, 16) for n in lengths]),
            ("prefill", 28, 4, [min(n, 200) for n in lengths]),
            ("prefill, portable", 28, 4, [min(n, 200) for n in lengths]),
        ):
            case = make_case(k, v, lengths, dtype=dtype, counts=counts, heads=heads, kv_heads=kv_heads)
            error = compare(attend(op, case), reference(case))
            yield {"op": op, "dtype": str(dtype)[6:], "k": k, "v": v, "queries": max(counts), "heads": heads} | error


def write_rows() -> Iterator[dict[str, Any]]:
    """Error of what is stored against the float64 rotation: rounding and quantisation together."""
    tokens, heads, kv_heads, width = 2048, 16, 2, 128
    for dtype, k, v in PAIRS:
        layout = plain_layout(k, v, 1, kv_heads, width, 16, 0)
        pool = torch.full((tokens // 16, layout.block_stride), 0xFF, dtype=torch.uint8, device=DEVICE)
        qkv = torch.randn(tokens, heads + 2 * kv_heads, width, device=DEVICE).to(dtype)
        slots, positions = torch.randperm(tokens, device=DEVICE), torch.arange(tokens, device=DEVICE)
        angles = positions[:, None] * 1e6 ** -torch.arange(0, 1, 2 / width, dtype=torch.float64, device=DEVICE)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = qkv[:, heads : heads + kv_heads].double().chunk(2, -1)
        wanted = {"k": torch.cat((a * cos - b * sin, b * cos + a * sin), -1), "v": qkv[:, heads + kv_heads :].double()}
        table = torch.cat((angles.cos(), angles.sin()), 1).float()
        write = WriteKV(k, v, width, dtype, DEVICE)
        write(layout, pool, qkv, qkv[:, :heads], slots, positions, table)
        index = slots // 16, slice(None), slots % 16
        for part, kv_format in (("k", k), ("v", v)):
            data, scales = rows_of(pool, layout, part)
            stored = None if scales is None else scales[index].contiguous().view(torch.float16)
            error = compare(decode(data[index], stored, kv_format), wanted[part])
            yield {"op": f"write {part}", "dtype": str(dtype)[6:], "k": k, "v": v} | error


def linear_rows() -> Iterator[dict[str, Any]]:
    """Linear layers with 4-bit weights, against float64 on the dequantised weight."""
    rows, columns = 4608, 3584
    for dtype in (torch.float16, torch.bfloat16):
        for group, zeros in ((32, True), (64, False), (128, False), (128, True), (columns, True)):
            shape = rows, columns // group
            weight = W4Weight(
                torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=DEVICE),
                (torch.rand(shape, device=DEVICE) * 0.01 + 0.002).half(),
                torch.randint(0, 16, shape, dtype=torch.uint8, device=DEVICE) if zeros else None,
                torch.randperm(columns, device=DEVICE).int(),
                group,
            )
            linear, exact = W4Linear(pack(weight, dtype)), weight.dequantize(torch.float64)
            for tokens in (1, 16, 32, 64, 200, 1500):
                x = torch.randn(tokens, columns, device=DEVICE).to(dtype)
                torch.empty(tokens * rows * 8, device=DEVICE).fill_(float("nan"))  # what comes next from the allocator
                error = compare(linear(x), x.double() @ exact.T)
                kind = f"g{'row' if group == columns else group}{' zeros' if zeros else ''}"
                yield {"op": "linear W4", "dtype": str(dtype)[6:], "k": kind, "v": "", "queries": tokens} | error


def compile_all() -> int:
    """Compile every variant for every architecture; returns how many spill."""
    units = all_variants() + cuda_linear_w4.all_variants()
    jobs = [(unit, target) for unit in units for target in ("sm_80", "sm_86", "sm_89", "sm_90")]
    spilled = 0
    for (unit, target), binary in zip(jobs, build(jobs), strict=True):
        if binary.spill_bytes:
            print(f"{target} {unit.file} {dict(unit.macros)}: {binary.spill_bytes} bytes spilled")
            spilled += 1
    print(f"{len(jobs)} compiled, {spilled} spill registers")
    return spilled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="only compile, for every architecture; needs no GPU")
    parser.add_argument("--output", type=Path, help="write the table here as JSON")
    arguments = parser.parse_args()
    if arguments.compile:
        return 1 if compile_all() else 0
    probe(0)
    torch.manual_seed(0)
    rows = []
    for row in (*attention_rows(), *write_rows(), *linear_rows()):
        # What is written differs from the original by the format's own rounding: no limit but a finite one.
        row["passed"] = row["cosine"] >= (0.99 if row["op"].startswith("write") else LEAST_COSINE)
        rows.append(row)
        print(
            f"{row['op']:17} {row['dtype']:9} K {row['k']:12} V {row['v']:12} cosine {row['cosine']:.8f}  "
            f"max abs {row['max_abs_error']:.2e}  relative {row['relative_error']:.2e}"
            + ("" if row["passed"] else "  FAILED")
        )
    failed = sum(not row["passed"] for row in rows)
    print(f"{len(rows)} rows, {failed} failed")
    if arguments.output:
        result = {"environment": describe() | {"driver_cuda": driver_version()}, "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
