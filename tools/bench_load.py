"""How fast a checkpoint loads, beside a plain read of its files from the same disk, and what memory that takes.

    python -m tools.bench_load [--gigabytes 1.5] [--format bf16,w4] [--folder DIR] [--threads N]

Writes a random Llama in shards (removed afterwards), drops it from the page cache, reads it sequentially, drops it
again and loads it in a process of its own. Memory is anonymous resident memory of that process, every 5 ms: what the
kernel can't take back, so mapped files don't count. `extra` is its peak beyond what is left when the model is loaded.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_core.model.config import ModelConfig, from_hf
from engine_core.model.weights import expected_shapes
from kernels.w4_format import W4Weight
from protocol.config import EngineConfig
from tools import hf_folder
from tools.environment import describe
from tools.quantize_w4 import LINEAR, config_entry, packed_tensors
from tools.w4_rounding import Options

GROUP = 128
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
_BLOCK = 8 << 20  # of a plain read


def config_of(gigabytes: float, form: str) -> dict[str, Any]:
    """A Llama with as many layers as fill the size."""
    config: dict[str, Any] = SHAPE | {"num_hidden_layers": 1}
    per_layer = sum(
        torch.Size(s).numel() for n, s in expected_shapes(from_hf(config)).items() if n.startswith("layers")
    )
    per_layer = per_layer * 2 if form == "bf16" else per_layer // 2 + per_layer // GROUP * 2
    rest = 2 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
    config["num_hidden_layers"] = max(1, round((gigabytes * 1e9 - rest) / per_layer))
    if form == "w4":
        config["quantization_config"] = config_entry(Options(GROUP, True, torch.bfloat16), False)
    return config


def random_tensors(model: ModelConfig, form: str) -> Iterator[tuple[str, Tensor]]:
    linear = {name for names in LINEAR.values() for name in names}
    for name, shape in expected_shapes(model).items():
        module = hf_folder.module_name(name, model)
        if form == "bf16" or name.rpartition(".")[2] not in linear:
            scale = 0.02 if len(shape) == 2 else 1.0
            yield f"{module}.weight", (torch.randn(shape) * scale).bfloat16()
            continue
        codes = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8)
        scales = torch.full((shape[0], shape[1] // GROUP), 0.005, dtype=torch.bfloat16)
        yield from packed_tensors(module, W4Weight(codes, scales, None, None, GROUP))


def write(folder: Path, gigabytes: float, form: str, shard: int) -> int:
    config = config_of(gigabytes, form)
    (folder / "config.json").write_text(json.dumps(config))
    return hf_folder.write_tensors(folder, random_tensors(from_hf(config), form), shard)


def drop_from_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(folder: Path) -> float:
    """Seconds of a sequential read."""
    started, buffer = time.perf_counter(), bytearray(_BLOCK)
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - started


def resident() -> int:
    """Anonymous bytes of this process."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def load(folder: str, options: dict[str, Any], results: "multiprocessing.SimpleQueue[dict[str, float]]") -> None:
    """In a process of its own."""
    os.environ["GOMP_SPINCOUNT"] = "5000"  # as engine_core.load has it
    from engine_core.model_runner import load_runner

    before, done = resident(), threading.Event()
    peak, finished = before, 0.0

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, resident())

    def progress(count: int, total: int) -> None:
        nonlocal finished
        if count == total:
            finished = time.perf_counter()

    watcher = threading.Thread(target=watch)
    watcher.start()
    started, cpu = time.perf_counter(), time.process_time()
    runner = load_runner(EngineConfig(model=folder, num_blocks=8, max_cache=128, **options), progress)
    ready = time.perf_counter()
    done.set()
    watcher.join()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed on the way and kept by malloc is extra
    after = resident()
    planned = runner.memory["weights"]
    results.put(
        {
            "weights_s": finished - started,
            "ready_s": ready - started,
            "cpu_s": time.process_time() - cpu,
            "kept_bytes": after - before,
            "planned_weights_bytes": planned,
            "extra_bytes": peak - max(after, before),
        }
    )


def measure(form: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        shard = int(options.shard_megabytes * 1e6)
        size = write(folder, options.gigabytes, form, shard)
        drop_from_cache(folder)
        read_s = read_all(folder)
        drop_from_cache(folder)
        context = multiprocessing.get_context("spawn")
        results: multiprocessing.SimpleQueue[dict[str, float]] = context.SimpleQueue()
        settings = {"threads": options.threads, "dtype": "bf16", "weights": options.weights}
        process = context.Process(target=load, args=(name, settings, results))
        process.start()
        found = results.get()
        process.join()
        largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
        return {"format": form, "bytes": size, "largest_shard_bytes": largest, "read_s": read_s, **found}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--format", type=lambda value: value.split(","), default=["bf16", "w4"])
    parser.add_argument("--weights", default="auto", help="as for pagetide serve")
    parser.add_argument("--shard-megabytes", type=float, default=500)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; by default the temporary folder")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    rows = [measure(form, options) for form in options.format]
    print(
        f"{'format':<8}{'file':>9}{'read':>8}{'load':>8}{'ready':>8}{'CPU':>8}{'GB/s':>7}{'kept':>10}{'extra':>9}{'shard':>9}"
    )
    for row in rows:
        print(
            f"{row['format']:<8}{row['bytes'] / 1e6:>6.0f} MB{row['read_s']:>7.2f}s{row['weights_s']:>7.2f}s"
            f"{row['ready_s']:>7.2f}s{row['cpu_s']:>7.2f}s{row['bytes'] / row['weights_s'] / 1e9:>7.2f}"
            f"{row['kept_bytes'] / 1e6:>7.0f} MB{row['extra_bytes'] / 1e6:>6.0f} MB"
            f"{row['largest_shard_bytes'] / 1e6:>6.0f} MB"
        )
    if options.output:
        options.output.write_text(json.dumps(describe() | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
