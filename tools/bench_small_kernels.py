"""Time the norms, the activation, the gather, sampling, and dense layers of a few rows beside cuBLAS.

    python -m tools.bench_small_kernels [--only elementwise,dense,sampling] [--warm] [--output FILE.json]

Times are medians of graph replays; each graph rotates over copies of its data that together exceed the L2 cache five
times. `--warm` leaves sampling's logits where the output layer would: in L2, as far as they fit. A dense layer has
the kernel after it that a decoder has, but qkv a norm, in the time too: kernels that start early meet it there.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kernels import cuda_elementwise
from kernels.compiler import KernelError
from kernels.cuda_dense_linear import CudaGatedLinear
from kernels.cuda_linear import FEW_ROWS, FewRowsLinear, OneRowLinear
from kernels.cuda_linear_sm90 import MOST_ROWS, HopperLinear
from kernels.cuda_sampling import Sampling
from kernels.launcher import probe
from tools.bench_kernels import copy_bandwidth, time_calls
from tools.environment import describe

DEVICE = torch.device("cuda")
L2_TIMES_FIVE = 320 << 20
VOCAB = 151_936
KINDS = "elementwise", "dense", "sampling"
# name: scale of the normal logits, temperature, top_k, top_p, min_p
SAMPLERS: dict[str, tuple[float, float, int, float, float] | None] = {
    "greedy": None,
    "no filter": (2.0, 1.0, 0, 1.0, 0.0),
    "top_k 50, top_p 0.9": (2.0, 1.0, 50, 0.9, 0.0),
    "top_p 0.9, peaked": (6.0, 1.0, 0, 0.9, 0.0),
    "top_p 0.9, hundreds": (4.0, 1.0, 0, 0.9, 0.0),
    "top_p 0.9, flat": (1.0, 1.0, 0, 0.9, 0.0),
    "top_p 0.9, hot": (2.0, 100.0, 0, 0.9, 0.0),
    "min_p 0.05": (2.0, 1.0, 0, 1.0, 0.05),
    "min_p 0.05, flat": (1.0, 1.0, 0, 1.0, 0.05),
    "top_k 1000": (2.0, 1.0, 1000, 1.0, 0.0),
    "logprobs 20": (2.0, 1.0, 0, 1.0, 0.0),
}
DENSE = {
    "3b qkv": (2560, 2048),
    "3b o": (2048, 2048),
    "3b gate_up": (22016, 2048),
    "3b down": (2048, 11008),
    "7b qkv": (4608, 3584),
    "7b o": (3584, 3584),
    "7b gate_up": (37888, 3584),
    "7b down": (3584, 18944),
    "3b head": (VOCAB, 2048),
}


def repeated(calls: list[Callable[[], object]]) -> list[Callable[[], object]]:
    """At least 20 calls, so that a replay's start does not count."""
    return calls * max(1, -(-20 // len(calls)))


def elementwise(op: str, tokens: int, width: int, bandwidth: float) -> dict[str, Any]:
    per_token = {"rms_norm": 2, "add_rms_norm": 4, "silu_mul": 3, "embedding": 2}[op] * width * 2
    copies = max(1, -(-L2_TIMES_FIVE // (tokens * per_token)))
    factor = 2 if op == "silu_mul" else 1
    calls: list[Callable[[], object]] = []
    weight = torch.randn(width, device=DEVICE).bfloat16()
    table = torch.randn(150_000, width, device=DEVICE).bfloat16() if op == "embedding" else weight
    for _ in range(copies):
        x = torch.randn(tokens, factor * width, device=DEVICE).bfloat16()
        out, residual = (torch.empty(tokens, width, dtype=x.dtype, device=DEVICE).normal_() for _ in range(2))
        ids = torch.randint(150_000, (tokens,), device=DEVICE)
        if op == "rms_norm":
            calls.append(lambda x=x, out=out: cuda_elementwise.rms_norm(x, weight, 1e-6, out))
        elif op == "add_rms_norm":
            calls.append(lambda x=x, r=residual, out=out: cuda_elementwise.add_rms_norm(x, r, weight, 1e-6, out))
        elif op == "silu_mul":
            calls.append(lambda x=x, out=out: cuda_elementwise.silu_mul(x, out))
        else:
            calls.append(lambda ids=ids, out=out: cuda_elementwise.embedding(ids, table, out))
    times = time_calls(repeated(calls))
    rate = tokens * per_token / times["us"] / 1e6
    return {"op": op, "tokens": tokens, "width": width} | times | {"TB/s": rate, "of copy": rate / bandwidth}


def dense(layer: str, rows: int) -> list[dict[str, Any]]:
    """Rows by implementation, bf16, each with the kernel that follows in a decoder; `outs` and `in` of the weight."""
    outs, width = DENSE[layer]
    copies = max(2, -(-L2_TIMES_FIVE // (outs * width * 2)))
    weights = [torch.randn(outs, width, device=DEVICE).bfloat16() for _ in range(copies)]
    x, hidden = (torch.randn(rows, size, device=DEVICE).bfloat16() for size in (width, outs))
    other, norm = torch.randn(rows, 2048, device=DEVICE).bfloat16(), torch.ones(outs, device=DEVICE).bfloat16()
    is_summed, kind = layer.split()[1] in ("o", "down"), layer.split()[1]

    def follow(y: torch.Tensor) -> None:
        if is_summed:
            cuda_elementwise.add_rms_norm(y, hidden, norm, 1e-6)
        elif kind == "gate_up":
            cuda_elementwise.silu_mul(y)
        else:
            cuda_elementwise.rms_norm(other, norm[:2048], 1e-6)

    ways: dict[str, list[Callable[[torch.Tensor], torch.Tensor]]] = {
        "cuBLAS": [lambda x, w=w: F.linear(x, w) for w in weights]
    }
    if rows == 1:
        ways["one row"] = [OneRowLinear(w) for w in weights]
    with contextlib.suppress(KernelError):
        if rows <= FEW_ROWS:
            ways["few rows"] = [FewRowsLinear(w) for w in weights]
        if rows <= MOST_ROWS:
            ways["Hopper"] = [HopperLinear(w) for w in weights]
            if is_summed:
                ways["Hopper, parts"] = [HopperLinear(w).parts for w in weights]
    if kind == "gate_up":
        ways["with its gate"] = [CudaGatedLinear(w) for w in weights]
    found = []
    for way, runs in ways.items():
        then = follow if way != "with its gate" else lambda y: None
        us = time_calls(repeated([lambda run=run, then=then: then(run(x)) for run in runs]))["us"]
        size = {"layer": layer, "outs": outs, "in": width, "rows": rows, "way": way}
        found.append({"op": "dense"} | size | {"us": us, "TB/s": outs * width * 2 / us / 1e6})
    return found


def sampler(name: str, rows: int, dtype: torch.dtype, warm: bool) -> dict[str, Any]:
    scale, temperature, top_k, top_p, min_p = SAMPLERS[name] or (2.0, 0.0, 0, 1.0, 0.0)
    size = rows * VOCAB * dtype.itemsize
    copies = 1 if warm else max(1, -(-L2_TIMES_FIVE // size))
    batches = [(torch.randn(rows, VOCAB, device=DEVICE) * scale).to(dtype) for _ in range(copies)]
    found = Sampling(rows, VOCAB, dtype, DEVICE)
    parameters = [
        torch.full((rows,), temperature, device=DEVICE),
        torch.full((rows,), top_k, device=DEVICE),
        torch.full((rows,), top_p, device=DEVICE),
        torch.full((rows,), min_p, device=DEVICE),
    ]
    place = tuple(torch.arange(rows, device=DEVICE) for _ in range(3))
    token = place[0]
    if name == "greedy":
        calls: list[Callable[[], object]] = [lambda x=x: found.greedy(x) for x in batches]
    elif name == "logprobs 20":
        calls = [lambda x=x: found.top_logprobs(x, token, 20) for x in batches]
    else:
        calls = [lambda x=x: found.sample(x, *parameters, place) for x in batches]
    times = time_calls(repeated(calls))
    result = {"op": name, "rows": rows, "dtype": str(dtype).removeprefix("torch."), "cache": "warm" if warm else "cold"}
    return result | times | {"TB/s": size / times["us"] / 1e6}


def measure(kind: str, bandwidth: float, warm: bool) -> Iterator[dict[str, Any]]:
    """The results of one kind, each printed."""
    if kind == "elementwise":
        shapes = [("rms_norm", 2048), ("rms_norm", 3584), ("add_rms_norm", 2048), ("add_rms_norm", 3584)]
        shapes += [("silu_mul", 11_008), ("silu_mul", 18_944), ("embedding", 2048)]
        for tokens in (1, 64, 8192):
            for op, width in shapes:
                r = elementwise(op, tokens, width, bandwidth)
                speed = f"{r['us']:8.2f} us {r['TB/s']:5.2f} TB/s {r['of copy']:5.0%} of copy"
                print(f"{op:14} {tokens:5} x {width:6} {speed}")
                yield r
    elif kind == "dense":
        for layer in DENSE:
            for rows in (1, 2, 4, 8, 16, 32, 64, 128):
                for r in dense(layer, rows):
                    print(f"{layer:12} {rows:3} rows {r['way']:20} {r['us']:7.2f} us {r['TB/s']:5.2f} TB/s")
                    yield r
    else:
        for name in SAMPLERS:
            for rows in (1, 8, 32, 256):
                for dtype in (torch.float32, torch.bfloat16):
                    for is_warm in (False, True) if warm else (False,):
                        r = sampler(name, rows, dtype, is_warm)
                        speed = f"{r['us']:7.2f} us {r['TB/s']:5.2f} TB/s"
                        print(f"{name:20} {rows:3} rows {r['dtype']:8} {r['cache']} {speed}")
                        yield r


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(KINDS), help="kinds, commas between")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--warm", action="store_true", help="sampling also with its logits in L2")
    options = parser.parse_args()
    if unknown := set(options.only) - set(KINDS):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}; there are: {', '.join(KINDS)}")
    probe(0)
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth:.2f} TB/s")
    results = [result for kind in options.only for result in measure(kind, bandwidth, options.warm)]
    if options.output:
        report = describe() | {"copy_TB/s": bandwidth, "results": results}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
