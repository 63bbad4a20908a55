"""Time the CUDA kernels beside the copy bandwidth of the same process, and beside others' attention: torch's own, and
those of tools/attention_peers.py that can be imported.

    python -m tools.bench_kernels [--only ldwpo] [--shape gqa8,128,8192] [--formats bf16,e4m3]
        [--peers flashinfer,xformers] [--output FILE]

Times are medians of graph replays; each graph walks over the layers of a pool larger than the L2 cache.
"""

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kernels.compiler import Variant
from kernels.cuda_attention import DecodeAttention, PrefillAttention, WriteKV
from kernels.cuda_layout import plain_layout
from kernels.launcher import driver, kernel, probe
from tools.attention_peers import DTYPES, PEERS, Case, Peer, error_of
from tools.environment import describe
from tools.kv_cases import encode

DEVICE = torch.device("cuda")
Shape = tuple[str, int, int]  # of a decode step: model, batch, context
L2_TIMES_FIVE = 320 << 20
HEAD_DIM, BLOCK = 128, 16
# The largest error of a peer, as a share of the largest element: FA3 rounds query and weights to fp8, too. A call that
# is wrong is off by about 1.
ERRORS = {"bf16": 0.02, "e4m3": 0.2, "e5m2": 0.2}
# name: query heads, KV heads, layers
MODELS = {"3b": (16, 2, 36), "7b": (28, 4, 28), "8b": (32, 8, 32), "gqa8": (32, 4, 32)}
SHAPES: list[Shape] = [
    ("gqa8", 128, 8192),
    ("gqa8", 32, 8192),
    ("gqa8", 32, 1024),
    ("gqa8", 1, 8192),
    ("gqa8", 1, 32768),
    ("3b", 1, 1024),
    ("3b", 1, 8192),
    ("3b", 32, 8192),
    ("3b", 128, 512),
    ("7b", 32, 8192),
    ("8b", 1, 8192),
    ("8b", 32, 8192),
]


def time_calls(calls: Sequence[Callable[[], object]], replays: int = 20) -> dict[str, float]:
    """Microseconds per call, as median, 10th and 90th percentile over replays of a graph of all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    tenths = statistics.quantiles(times, n=10)
    return {"us": statistics.median(times), "us_p10": tenths[0], "us_p90": tenths[8]}


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy of 4 GiB, bytes read and bytes written."""
    a = torch.empty(1 << 32, dtype=torch.uint8, device=DEVICE).random_()
    b = torch.empty_like(a)
    times = []
    for _ in range(12):  # not in a graph: its copy nodes are slower
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return 2 * a.numel() / statistics.median(times[2:]) / 1e6


def random_pool(kv_format: str, v_format: str, layers: int, kv_heads: int, blocks: int) -> torch.Tensor:
    """Stored random numbers: one image's worth of each format, shuffled over the blocks."""
    layout = plain_layout(kv_format, v_format, layers, kv_heads, HEAD_DIM, BLOCK, 0)
    rows = kv_heads * BLOCK
    parts, scales = [], []
    for _ in range(layers):
        for f in (kv_format, v_format):
            data, scale = encode(torch.randn(rows, HEAD_DIM, device=DEVICE), f)
            parts.append(data.flatten())
            if scale is not None:
                scales.append(scale.view(torch.uint8).flatten())
    image = torch.cat(parts + scales)
    pool = torch.empty((blocks, layout.block_stride), dtype=torch.uint8, device=DEVICE)
    pool[:] = image
    return pool


def decode_attention(model: str, batch: int, context: int, kv_format: str, v_format: str) -> dict[str, Any]:
    heads, kv_heads, _ = MODELS[model]
    layout = plain_layout(kv_format, v_format, 1, kv_heads, HEAD_DIM, BLOCK, 0)
    per_request = -(-context // BLOCK)
    layers = max(1, -(-L2_TIMES_FIVE // (batch * per_request * layout.block_stride)))
    blocks = batch * per_request
    pool = random_pool(kv_format, v_format, layers, kv_heads, blocks)
    layouts = [plain_layout(kv_format, v_format, layers, kv_heads, HEAD_DIM, BLOCK, i) for i in range(layers)]
    tables = torch.randperm(blocks, device=DEVICE).int().view(batch, per_request)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    query = torch.randn(batch, heads, HEAD_DIM, device=DEVICE).bfloat16()
    out = torch.empty_like(query)
    attention = DecodeAttention(kv_format, v_format, heads, kv_heads, HEAD_DIM, torch.bfloat16, DEVICE, batch)
    plan = time_calls([lambda: attention.plan(tables, lengths, starts)] * 20)
    calls = [lambda at=at: attention(at, pool, query, out) for at in layouts]
    times = time_calls(calls * max(1, 20 // layers))
    tokens = batch * context
    read = tokens * layout.block_stride / BLOCK
    result = {"op": "decode", "model": model, "batch": batch, "context": context, "k": kv_format, "v": v_format}
    return result | times | {"TB/s": read / times["us"] / 1e6, "plan_us": plan["us"], "grid": attention._grid}


def sdpa_decode(model: str, batch: int, context: int) -> dict[str, Any]:
    """cuDNN's attention over contiguous bf16 KV."""
    heads, kv_heads, _ = MODELS[model]
    layers = max(1, -(-L2_TIMES_FIVE // (batch * context * kv_heads * HEAD_DIM * 4)))
    kv = torch.randn(layers, 2, batch, kv_heads, context, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    query = torch.randn(batch, heads, 1, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        calls = [lambda x=x: F.scaled_dot_product_attention(query, x[0], x[1], enable_gqa=True) for x in kv]
        times = time_calls(calls * max(1, 20 // layers))
    read = 2 * batch * kv_heads * context * HEAD_DIM * 2
    result = {
        "op": "decode, cuDNN contiguous",
        "model": model,
        "batch": batch,
        "context": context,
        "k": "bf16",
        "v": "bf16",
    }
    return result | times | {"TB/s": read / times["us"] / 1e6}


def peer_decode(peer: Peer, module: Any, shape: Shape, kv_format: str) -> dict[str, Any]:
    """Another's attention over pages of its own. Raises whatever it raises, and ValueError if its result is wrong."""
    model, batch, context = shape
    heads, kv_heads, _ = MODELS[model]
    per_request = -(-context // BLOCK)
    read = 2 * batch * context * kv_heads * HEAD_DIM * DTYPES[kv_format].itemsize
    sizes = batch * per_request, BLOCK, kv_heads, HEAD_DIM

    def pages() -> torch.Tensor:
        return torch.randn(sizes, device=DEVICE, dtype=torch.bfloat16).to(DTYPES[kv_format])

    layers = [(pages(), pages()) for _ in range(max(1, -(-L2_TIMES_FIVE // read)))]
    query = torch.randn(batch, heads, HEAD_DIM, device=DEVICE).bfloat16()
    tables = torch.randperm(sizes[0], device=DEVICE).int().view(batch, per_request)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    case = Case(query, tables, lengths, kv_heads, BLOCK, kv_format)
    attend = peer.prepare(module, case)
    error = error_of(case, attend, *layers[0])
    if not error < ERRORS[kv_format]:
        raise ValueError(f"its result is off by {error:.2g} of the largest element")
    times = time_calls([lambda x=x: attend(*x) for x in layers] * max(1, 20 // len(layers)))
    result = {"op": f"decode, {peer.title}", "model": model, "batch": batch, "context": context}
    return result | {"k": kv_format, "v": kv_format} | times | {"TB/s": read / times["us"] / 1e6}


def run_peers(
    names: Sequence[str], formats: Sequence[str], shapes: Sequence[Shape], add: Callable[[dict[str, Any]], None]
) -> None:
    """Time those that can be imported, all or the named ones; one that fails is told of, and others go on."""
    for peer in PEERS:
        if names and peer.name.lower().replace(" ", "-") not in names:
            continue
        try:
            module = peer.load()
        except Exception as error:
            print(f"{peer.name}: can't be imported: {_line(error)}")
            continue
        for shape in shapes:
            for kv_format in [one for one in peer.formats if not formats or one in formats]:
                try:
                    add(peer_decode(peer, module, shape, kv_format))
                except Exception as error:
                    print(f"{peer.title}, {kv_format}, {shape}: {_line(error)}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


def prefill_attention(model: str, tokens: int, context: int, kv_format: str, portable: bool = False) -> dict[str, Any]:
    heads, kv_heads, _ = MODELS[model]
    layout = plain_layout(kv_format, kv_format, 1, kv_heads, HEAD_DIM, BLOCK, 0)
    pool = random_pool(kv_format, kv_format, 1, kv_heads, context // BLOCK)
    tables = torch.randperm(context // BLOCK, device=DEVICE).int()[None]
    lengths = torch.tensor([context], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    query = torch.randn(tokens, heads, HEAD_DIM, device=DEVICE).bfloat16()
    out = torch.empty_like(query)
    attention = PrefillAttention(
        kv_format, kv_format, heads, kv_heads, HEAD_DIM, torch.bfloat16, DEVICE, portable=portable
    )
    times = time_calls([lambda: attention(layout, pool, query, out, tables, lengths, starts)] * 3)
    pairs = tokens * context - tokens * (tokens - 1) / 2
    op = "prefill, portable" if portable else "prefill"
    result = {"op": op, "model": model, "tokens": tokens, "context": context, "k": kv_format, "v": kv_format}
    return result | times | {"TFLOP/s": 4 * pairs * heads * HEAD_DIM / times["us"] / 1e6}


def sdpa_prefill(model: str, tokens: int, backend: str) -> dict[str, Any]:
    heads, kv_heads, _ = MODELS[model]
    q, k, v = (torch.randn(1, h, tokens, HEAD_DIM, device=DEVICE).bfloat16() for h in (heads, kv_heads, kv_heads))
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        times = time_calls([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)] * 3)
    result = {"op": f"prefill, {backend} contiguous", "model": model, "tokens": tokens, "context": tokens}
    return result | times | {"TFLOP/s": 2 * tokens * (tokens + 1) * heads * HEAD_DIM / times["us"] / 1e6}


def write_kv(model: str, tokens: int, kv_format: str) -> dict[str, Any]:
    heads, kv_heads, _ = MODELS[model]
    layout = plain_layout(kv_format, kv_format, 1, kv_heads, HEAD_DIM, BLOCK, 0)
    sets = max(2, min(64, L2_TIMES_FIVE // (tokens * (heads + 2 * kv_heads) * HEAD_DIM * 2)))
    qkv = torch.randn(sets, tokens, heads + 2 * kv_heads, HEAD_DIM, device=DEVICE).bfloat16()
    query = torch.empty(sets, tokens, heads, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    pool = torch.zeros((sets, -(-tokens // BLOCK), layout.block_stride), dtype=torch.uint8, device=DEVICE)
    slots, positions = torch.arange(tokens, device=DEVICE), torch.arange(tokens, device=DEVICE)
    table = torch.randn(tokens, HEAD_DIM, device=DEVICE)
    write = WriteKV(kv_format, kv_format, HEAD_DIM, torch.bfloat16, DEVICE)
    calls = [lambda i=i: write(layout, pool[i], qkv[i], query[i], slots, positions, table) for i in range(sets)]
    times = time_calls(calls)
    moved = tokens * ((2 * heads + 2 * kv_heads) * HEAD_DIM * 2 + layout.block_stride / BLOCK + HEAD_DIM * 4)
    result = {"op": "write", "model": model, "tokens": tokens, "k": kv_format, "v": kv_format}
    return result | times | {"TB/s": moved / times["us"] / 1e6}


def launch_cost(count: int = 3000) -> dict[str, Any]:
    """Host microseconds of a launch: ours, and the bare driver call with its arguments ready."""
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    ours = kernel(Variant("probe.cu"), "P", 1, torch.cuda.current_device())
    pointer, stream, launch = out.data_ptr(), torch.cuda.current_stream().cuda_stream, driver().cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    function, parameters = ours._function, ctypes.cast(ours._parameters, ctypes.c_void_p)
    batch = torch.randn(1, 32, HEAD_DIM, device=DEVICE).bfloat16()
    layout = plain_layout("bf16", "bf16", 1, 4, HEAD_DIM, BLOCK, 0)
    pool = torch.zeros((1, layout.block_stride), dtype=torch.uint8, device=DEVICE)
    tables = torch.zeros((1, 1), dtype=torch.int32, device=DEVICE)
    lengths = torch.ones(1, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    attention = DecodeAttention("bf16", "bf16", 32, 4, HEAD_DIM, torch.bfloat16, DEVICE, 1)
    attention.plan(tables, lengths, starts)
    queries = torch.empty_like(batch)

    def bare() -> None:
        launch(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, None)

    def whole() -> None:
        attention(layout, pool, batch, queries)

    ours((1, 1, 1), pointer)  # fills in the arguments
    found: dict[str, Any] = {"op": "launch, host"}
    for name, call in (("bare_us", bare), ("ours_us", lambda: ours((1, 1, 1), pointer)), ("attention_op_us", whole)):
        samples = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count // 5):
                call()
            samples.append((time.perf_counter() - start) / (count // 5) * 1e6)
            torch.cuda.synchronize()
        found[name] = statistics.median(samples)
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the results here as JSON")
    parser.add_argument(
        "--only",
        default="ldwpo",
        help="groups by their letters: l(aunch), d(ecode), w(rite), p(refill), o(thers' decode)",
    )
    parser.add_argument("--shape", type=_shape, help="MODEL,BATCH,CONTEXT: this decode step and no other")
    names = [peer.name.lower().replace(" ", "-") for peer in PEERS]
    parser.add_argument("--peers", default="", help=f"with commas between, of {', '.join(names)}; the default is all")
    parser.add_argument("--formats", default="", help="of the KV in decode steps, with commas between")
    options = parser.parse_args(arguments)
    options.formats = options.formats.split(",") if options.formats else []
    options.peers = options.peers.split(",") if options.peers else []
    if unknown := set(options.peers) - set(names):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    return options


def _shape(text: str) -> Shape:
    model, *sizes = text.split(",")
    if model not in MODELS:
        raise argparse.ArgumentTypeError(f"no such model: {model}; there are: {', '.join(MODELS)}")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text}: wanted MODEL,BATCH,CONTEXT, such as 3b,32,8192")
    return model, int(sizes[0]), int(sizes[1])


def main() -> None:
    options = parse()
    groups, shapes = options.only, [options.shape] if options.shape else SHAPES
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return
    probe(0)
    copy = copy_bandwidth()
    print(f"copy {copy:.3f} TB/s")
    rows = []

    def add(row: dict[str, Any]) -> None:
        if "TB/s" in row:
            row["of_copy"] = row["TB/s"] / copy
        rows.append(row)
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else str(v) for k, v in row.items()), flush=True)

    if "l" in groups:
        add(launch_cost())
    if "d" in groups:
        for shape in shapes:
            for kv_format in options.formats or ("bf16", "int8", "e4m3", "e5m2", "e4m3_scaled"):
                add(decode_attention(*shape, kv_format, kv_format))
            add(sdpa_decode(*shape))
        for v in ("int8", "e4m3") if SHAPES[0] in shapes and not options.formats else ():
            add(decode_attention(*SHAPES[0], "bf16", v))
    if "w" in groups:
        for model in ("3b", "8b"):
            for tokens in (1, 64, 8192):
                for kv_format in ("bf16", "int8", "e4m3"):
                    add(write_kv(model, tokens, kv_format))
    if "p" in groups:
        for kv_format in ("bf16", "int8", "e4m3", "e5m2", "e4m3_scaled"):
            add(prefill_attention("gqa8", 8192, 8192, kv_format))
        for kv_format in ("bf16", "int8", "e4m3"):
            add(prefill_attention("gqa8", 8192, 8192, kv_format, portable=True))
        add(prefill_attention("gqa8", 2048, 32768, "bf16"))
        add(prefill_attention("gqa8", 512, 8192, "bf16"))
        for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            add(sdpa_prefill("gqa8", 8192, backend))
    if "o" in groups:  # last: who breaks the CUDA context breaks it for those after it
        run_peers(options.peers, options.formats, shapes, add)
    if options.output:
        result = {"environment": describe(), "copy_TB/s": copy, "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
