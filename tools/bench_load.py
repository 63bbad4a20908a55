"""How fast a checkpoint loads, beside a plain read of its files in the same run, and when it serves a first token.

    python -m tools.bench_load [--gigabytes 1.5] [--format bf16,w4,q8_0,q4_0] [--weights auto,dense] [--device cpu|cuda]
        [--serve] [--iterations 3] [--folder DIR] [--threads N] [--output FILE.json]

Writes a model of `--config`'s shape with random weights, as many layers as fill `--gigabytes` (0: all), and removes it
afterwards. bf16 is in shards, w4 too (compressed-tensors, groups of 128), q8_0 and q4_0 are GGUF files.

* **read**: all files in turn, 8 MiB at a time into one buffer.
* **load**: `open_model` and `load_decoder` in a process of its own, to the last copy; not Python's start, nor CUDA's.
* **cold**: after POSIX_FADV_DONTNEED on every file; `cached` is what the system still had of them then. warm: after a
  read. Of `--iterations`, in turn, the least counts; of `cached` and `extra` the most.
* **extra**: peak of anonymous and shared resident memory, every 5 ms, beyond what is left once the model is loaded: on
  a GPU, beyond what there was before. Mapped files don't count, nor do the 32 MiB that are pinned for copies.
* **ready**, **first**: seconds from `pagetide serve`, cold, to its ready line and to the first token over HTTP.
"""

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import httpx
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from engine_core.model import weights_gguf
from engine_core.model.config import ModelConfig, from_hf
from engine_core.model.weights import expected_shapes
from kernels.w4_format import W4Weight
from protocol.config import EngineConfig
from tools import hf_folder
from tools.measurement import Column, Figures, print_table, save, server
from tools.quantize_w4 import LINEAR, config_entry, packed_tensors
from tools.w4_rounding import Options

GROUP = 128
SCALE = 0.02
PROMPT = "Once upon a time there was a page that wanted to see the disk. "
COLUMNS: list[Column] = [
    ("format", "format", "s"), ("kept", "weights", "s"), ("GB", "gigabytes", ".2f"), ("cached", "cached", ".0%"),
    ("cold read", "cold_read", ".2f"), ("load", "cold_load", ".2f"), ("ratio", "cold_ratio", ".2f"),
    ("warm read", "warm_read", ".2f"), ("load", "warm_load", ".2f"), ("ratio", "warm_ratio", ".2f"),
    ("CPU", "cpu", ".2f"), ("model MB", "kept_mb", ".0f"), ("extra MB", "extra_mb", ".0f"),
    ("shard MB", "shard_mb", ".0f"), ("ready", "ready", ".1f"), ("first", "first", ".1f"),
]  # fmt: skip
_BLOCK = 8 << 20  # bytes of a plain read
_POOL = 1 << 24  # random elements, which tensors repeat


def bytes_of(elements: int, form: str) -> int:
    """Bytes of a linear weight."""
    return {"bf16": elements * 2, "w4": elements // 2 + elements // GROUP * 2}.get(
        form, elements // 32 * (34 if form == "q8_0" else 18)
    )


def config_of(config: dict[str, Any], gigabytes: float, form: str) -> dict[str, Any]:
    """The config with as many layers as fill the size."""
    config = {key: value for key, value in config.items() if key not in ("max_window_layers", "layer_types")}
    shapes = expected_shapes(from_hf(config | {"num_hidden_layers": 1}))
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    layer = sum(bytes_of(size, form) for name, size in sizes.items() if name.startswith("layers"))
    rest = sum(bytes_of(n, "bf16" if form == "w4" else form) for name, n in sizes.items() if "layers" not in name)
    if gigabytes:
        config["num_hidden_layers"] = max(1, round((gigabytes * 1e9 - rest) / layer))
    if form == "w4":
        config["quantization_config"] = config_entry(Options(GROUP, True, torch.bfloat16), False)
    return config


@cache
def _pool() -> Tensor:
    return torch.randn(_POOL) * SCALE


def random_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """bfloat16, 1 for norms."""
    if name.endswith("norm"):
        return torch.ones(shape, dtype=torch.bfloat16)
    count = torch.Size(shape).numel()
    pool = _pool().bfloat16()
    return pool.repeat(-(-count // _POOL))[:count].view(shape)


def random_tensors(model: ModelConfig, form: str) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a safetensors checkpoint."""
    linear = {name for names in LINEAR.values() for name in names}
    for name, shape in expected_shapes(model).items():
        base = name.removesuffix(".bias")
        module = hf_folder.module_name(base, model)
        if form == "bf16" or name.rpartition(".")[2] not in linear:
            yield f"{module}.{'weight' if base == name else 'bias'}", random_tensor(name, shape)
            continue
        codes = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8)
        scales = torch.full((shape[0], shape[1] // GROUP), SCALE / 4, dtype=torch.bfloat16)
        yield from packed_tensors(module, W4Weight(codes, scales, None, None, GROUP))


def write(folder: Path, config: dict[str, Any], form: str, shard: int) -> Path:
    """Write the checkpoint; what `pagetide serve` takes."""
    model = from_hf(config)
    if form not in ("bf16", "w4"):
        return write_gguf(folder / f"model-{form}.gguf", model, form)
    (folder / "config.json").write_text(json.dumps(config))
    byte_level = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(byte_level)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    hf_folder.write_tensors(folder, random_tensors(model, form), shard)
    return folder


def write_gguf(path: Path, model: ModelConfig, form: str) -> Path:
    """The model as a GGUF file: matrices quantised, the rest in F32."""
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_block_count(model.num_layers)
    writer.add_context_length(model.max_context)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_rope_freq_base(model.rope.theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*characters, "".join(characters[:2])]
    padding = range(len(tokens), model.vocab_size)
    writer.add_token_list(tokens + [f"[PAD{n}]" for n in padding])
    writer.add_token_types([1] * len(tokens) + [5] * len(padding))
    writer.add_token_merges([" ".join(characters[:2])])
    kind = gguf.GGMLQuantizationType[form.upper()]
    theirs = {ours: name for name, ours in weights_gguf.LAYER.items()}
    for name, shape in expected_shapes(model).items():
        base, is_bias = name.removesuffix(".bias"), name.endswith(".bias")
        if base.startswith("layers"):
            _, number, part = base.split(".")
            wanted = f"blk.{number}.{theirs[part]}"
        else:
            wanted = {"embed": "token_embd", "norm": "output_norm", "head": "output"}[base]
        if len(shape) == 1:
            writer.add_tensor(f"{wanted}.{'bias' if is_bias else 'weight'}", random_tensor(name, shape).float().numpy())
            continue
        few = _pool()[: _POOL // shape[1] // 16 * shape[1]].view(-1, shape[1])
        rows = torch.from_numpy(gguf.quants.quantize(few.numpy(), kind))
        data = rows.repeat(-(-shape[0] // len(rows)), 1)[: shape[0]]
        writer.add_tensor(f"{wanted}.weight", data.numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# -- the disk --------------------------------------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".gguf"))


def drop_from_cache(folder: Path) -> None:
    for file in files(folder):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(folder: Path) -> float:
    """How much of the files the system has in memory."""
    pages = held = 0
    for file in files(folder):
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
            count = -(-len(mapped) // mmap.PAGESIZE)
            found, view = (ctypes.c_ubyte * count)(), (ctypes.c_char * len(mapped)).from_buffer(mapped)
            if ctypes.CDLL(None).mincore(ctypes.byref(view), ctypes.c_size_t(len(mapped)), found):
                return float("nan")
            held += sum(byte & 1 for byte in bytes(found))
            pages += count
            del view
    return held / pages


def read_all(folder: Path) -> float:
    """Seconds of a sequential read."""
    started, buffer = time.perf_counter(), bytearray(_BLOCK)
    for file in files(folder):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - started


# -- loads -----------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Anonymous and shared bytes of this process."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


def load(config: EngineConfig, results: "multiprocessing.SimpleQueue[Figures]") -> None:
    """In a process of its own."""
    os.environ["GOMP_SPINCOUNT"] = "5000"  # as engine_core.load has it
    from engine_core.device import StepThreads, give_back_memory, keep_freed_memory, open_device
    from engine_core.open_model import load_decoder, open_model

    device = open_device(config.device)
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.mem_get_info()
    else:
        StepThreads(config.threads)
        keep_freed_memory()
    before, done = resident(), threading.Event()
    peak = before

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch, daemon=True)  # a load that fails ends all the same
    watcher.start()
    started, cpu = time.perf_counter(), time.process_time()
    model = open_model(config, device)
    decoder = load_decoder(model, config.model, lambda count, total: None)
    if device.type == "cuda":
        torch.cuda.synchronize()
    found: Figures = {"load": time.perf_counter() - started, "cpu": time.process_time() - cpu}
    done.set()
    watcher.join()
    give_back_memory()  # what was freed on the way and kept by malloc is extra
    after = torch.cuda.memory_allocated() if device.type == "cuda" else resident() - before
    base = before if device.type == "cuda" else max(before, resident())
    del decoder
    results.put(found | {"kept_mb": after / 1e6, "extra_mb": max(0, peak - base) / 1e6})


def in_process(config: EngineConfig) -> Figures:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.SimpleQueue[Figures] = context.SimpleQueue()
    process = context.Process(target=load, args=(config, results))
    process.start()
    while results.empty() and process.is_alive():
        process.join(0.05)
    if results.empty():
        raise RuntimeError(f"the load ended with {process.exitcode}")
    found = results.get()
    process.join()
    return found


def serve(config: EngineConfig) -> Figures:
    """Seconds from `pagetide serve` to its ready line and to the first token."""
    started = time.perf_counter()
    with server(config) as url:
        ready = time.perf_counter() - started
        body = {"prompt": PROMPT, "max_tokens": 16, "stream": True, "ignore_eos": True, "temperature": 0}
        body["model"] = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
            answer.raise_for_status()
            lines = [(time.perf_counter(), line) for line in answer.iter_lines() if line.startswith("data: {")]
    return {"ready": ready, "first": lines[0][0] - started, "events": len(lines)}


def measure(folder: Path, model: Path, form: str, weights: str, options: argparse.Namespace) -> Figures:
    config = EngineConfig(
        model=str(model), device=options.device, dtype="bf16", weights=weights, threads=options.threads,
        num_blocks=64, max_cache=512,
    )  # fmt: skip
    sizes = [file.stat().st_size for file in files(folder)]
    row: Figures = {"format": form, "weights": weights, "gigabytes": sum(sizes) / 1e9, "shard_mb": max(sizes) / 1e6}
    rounds: list[Figures] = []
    for _ in range(options.iterations):
        drop_from_cache(folder)
        share = cached_share(folder)
        found: Figures = {"cached": share, "cold_read": read_all(folder), "warm_read": read_all(folder)}
        warm = in_process(config)
        drop_from_cache(folder)
        cold = in_process(config)
        rounds.append(found | warm | {"warm_load": warm["load"], "cold_load": cold["load"]})
    row |= {key: min(one[key] for one in rounds) for key in rounds[0]}
    row |= {key: max(one[key] for one in rounds) for key in ("extra_mb", "cached")}
    row |= {f"{kind}_ratio": row[f"{kind}_load"] / row[f"{kind}_read"] for kind in ("cold", "warm")}
    if options.serve:
        drop_from_cache(folder)
        row |= serve(config)
    return row | {"rounds": rounds}


def parser() -> argparse.ArgumentParser:
    config = Path(__file__).parents[1] / "tests/data/configs/qwen2.5-3b/config.json"
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--config", type=Path, default=config, help="a config.json")
    made.add_argument("--gigabytes", type=float, default=1.5, help="of a checkpoint; 0: all layers")
    made.add_argument("--format", type=lambda value: value.split(","), default=["bf16", "w4"], help="commas between")
    made.add_argument("--weights", type=lambda value: value.split(","), default=["auto"], help="as for pagetide serve")
    made.add_argument("--device", default="cpu", help="cpu or cuda")
    made.add_argument("--serve", action="store_true", help="also start pagetide serve")
    made.add_argument("--iterations", type=int, default=3, help="rounds; the least counts")
    made.add_argument("--shard-megabytes", type=float, default=500, help="of bf16 and w4")
    made.add_argument("--folder", type=Path, default=None, help="where to write; by default the temporary folder")
    made.add_argument("--threads", type=int, default=0, help="as for pagetide serve")
    made.add_argument("--output", type=Path, help="write the figures as JSON")
    return made


def main() -> None:
    options = parser().parse_args()
    rows = []
    for form in options.format:
        folder = Path(tempfile.mkdtemp(prefix="pt-load-", dir=options.folder))
        try:
            config = config_of(json.loads(options.config.read_text("utf-8")), options.gigabytes, form)
            model = write(folder, config, form, int(options.shard_megabytes * 1e6))
            rows += [measure(folder, model, form, weights, options) for weights in options.weights]
        finally:
            shutil.rmtree(folder)
    print_table(rows, COLUMNS)
    save(options, {"rows": rows})


if __name__ == "__main__":
    main()
