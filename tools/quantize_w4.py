"""Quantise a model to 4 bits: compressed-tensors W4A16, which Pagetide, transformers and others load.

    python -m tools.quantize_w4 IN OUT [--group-size 128] [--asymmetric] [--gptq TEXT] [--no-perplexity]

IN is a folder with safetensors or a GGUF file, OUT a new folder. The layers' linear weights become 4-bit; embedding,
norms and head stay in 16 bits. Weights are rounded to the nearest code under scales that make the least error, or,
with --gptq, so that what the layers give on TEXT changes least. Perplexity is of --text before and after, in the
same windows as tools/eval_kv.py takes them.
"""

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from engine_core.batch import build_batch
from engine_core.device import open_device
from engine_core.model.decoder import Layer
from engine_core.model.weights import Weights, expected_shapes
from engine_core.model_runner import ModelRunner, load_runner
from engine_core.open_model import OpenModel, open_model
from engine_core.plan import Row, StepPlan
from frontend.vocab import load_text_model
from kernels.linear import DenseLinear, Linear
from kernels.w4_format import W4Weight, pack_nibbles
from protocol.config import EngineConfig
from protocol.errors import StartupError
from protocol.messages import SamplingParams
from tools.eval_kv import BLOCK, DATA, Material, runs_of, score
from tools.hf_folder import is_16bit, module_name, norm_shift, write_rest, write_tensors
from tools.w4_rounding import Options, round_weight

LINEAR = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
_GREEDY = SamplingParams(temperature=0.0)
_CHARACTERS = 1 << 20  # what `encode` takes


class InputStatistics:
    """A linear layer that also sums x x^T of its inputs."""

    def __init__(self, layer: Linear) -> None:
        self._layer, self._sum, self._count = layer, torch.zeros(()), 0

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        self._sum, self._count = self._sum + wide.T @ wide, self._count + len(x)
        return self._layer(x)

    @property
    def hessian(self) -> Tensor:
        return self._sum / self._count


def run_model(path: Path, context: int, threads: int) -> ModelRunner:
    """A runner with dense weights and room for one request."""
    blocks = -(-context // BLOCK)
    return load_runner(
        EngineConfig(
            model=str(path),
            weights="dense",
            max_cache=context,
            num_blocks=blocks,
            block_size=BLOCK,
            threads=threads,
        )
    )


def perplexity(path: Path, ids: Sequence[int], options: argparse.Namespace) -> Tensor:
    """Losses of the text's tokens."""
    window = min(options.window, len(ids))
    material = Material(list(ids), [], window, max(window // 2, 1), 0)
    losses, _ = score(run_model(path, window, options.threads), material)
    gc.collect()
    return losses


def calibrated(
    model: OpenModel, path: Path, sequences: Sequence[Sequence[int]], options: Options, threads: int
) -> Iterator[tuple[str, W4Weight]]:
    """GPTQ, layer by layer: each sees what the layers before it give once they are rounded."""
    assert model.weights is not None
    runner = run_model(path, max(map(len, sequences)), threads)
    decoder, kv, table = runner.decoder, runner.store.kv, list(range(runner.num_blocks))
    windows = frozenset(model.config.windows)

    def run(layer: Layer, number: int) -> list[Tensor]:
        results = []
        for batch, tables, hidden in zip(batches, ropes, states, strict=True):
            results.append(hidden.clone())
            decoder.run_layer(layer, results[-1], kv.layers[number], tables[layer.rope], batch)
        return results

    with torch.inference_mode():
        plans = [StepPlan(0, [], [Row(0, ids, 0, table, False, _GREEDY, 0)]) for ids in sequences]
        batches = [build_batch(plan, kv, windows, model.maker.dtype) for plan in plans]
        ropes = [decoder.rope_tables(batch) for batch in batches]
        states = [decoder.embed(batch) for batch in batches]
        for number, layer in enumerate(decoder.layers):
            seen: dict[str, Any] = {part: InputStatistics(getattr(layer, part)) for part in LINEAR}
            run(replace(layer, **seen), number)
            rounded: dict[str, Any] = {}
            for part, names in LINEAR.items():
                packed = []
                for name in (f"layers.{number}.{name}" for name in names):
                    packed.append(round_weight(model.weights.dense(name), options, seen[part].hessian))
                    yield name, packed[-1]
                rounded[part] = _dense(model, number, names, packed)
            decoder.layers[number] = replace(layer, **rounded)
            states = run(decoder.layers[number], number)


def _dense(model: OpenModel, number: int, names: Sequence[str], packed: Sequence[W4Weight]) -> DenseLinear:
    assert model.weights is not None
    at = [f"layers.{number}.{name}.bias" for name in names]
    biases = [model.weights.dense(name).to(model.maker.dtype) for name in at if name in model.weights.shapes]
    weight = torch.cat([part.dequantize(model.maker.dtype) for part in packed])
    return DenseLinear(weight, torch.cat(biases) if biases else None)


def nearest(model: OpenModel, options: Options) -> Iterator[tuple[str, W4Weight]]:
    """Round to nearest."""
    assert model.weights is not None
    for number in range(model.config.num_layers):
        for name in (f"layers.{number}.{name}" for names in LINEAR.values() for name in names):
            yield name, round_weight(model.weights.dense(name), options)


def stored(
    model: OpenModel, rounded: Iterator[tuple[str, W4Weight]], dtype: torch.dtype, done: Callable[[int], None]
) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the new checkpoint by name."""
    weights, config = model.weights, model.config
    assert weights is not None
    linear = {f"layers.{n}.{name}" for n in range(config.num_layers) for names in LINEAR.values() for name in names}
    for name in (name for name in expected_shapes(config) if name not in linear):
        tensor, base = weights.dense(name), name.removesuffix(".bias")
        if name.endswith("norm"):
            tensor = tensor - norm_shift(config) if norm_shift(config) else tensor
        suffix = "bias" if base != name else "weight"
        yield f"{module_name(base, config)}.{suffix}", tensor if is_16bit(tensor) else tensor.to(dtype)
        done(tensor.numel())
    for name, weight in rounded:
        yield from packed_tensors(module_name(name, config), weight)
        done(2 * weight.codes.numel())


def packed_tensors(module: str, weight: W4Weight) -> Iterator[tuple[str, Tensor]]:
    """A 4-bit weight as compressed-tensors stores it."""
    yield f"{module}.weight_packed", weight.codes.view(torch.int32)
    yield f"{module}.weight_scale", weight.scales
    yield f"{module}.weight_shape", torch.tensor(weight.shape)
    if weight.zeros is not None:
        yield f"{module}.weight_zero_point", packed_zeros(weight.zeros)


def packed_zeros(zeros: Tensor) -> Tensor:
    """uint8 `[out, groups]` as compressed-tensors has them: int32 `[out / 8, groups]`, padded with -8 + 8."""
    padded = torch.nn.functional.pad(zeros.T, (0, -len(zeros) % 8))
    return pack_nibbles(padded).contiguous().view(torch.int32).T.contiguous()


def config_entry(options: Options, uses_gptq: bool) -> dict[str, Any]:
    """The quantization_config."""
    whole_rows = options.group_size == -1
    weights = {
        "actorder": "weight" if uses_gptq else None,
        "dynamic": False,
        "group_size": None if whole_rows else options.group_size,
        "num_bits": 4,
        "observer": "mse",
        "strategy": "channel" if whole_rows else "group",
        "symmetric": options.symmetric,
        "type": "int",
    }
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def quantize(source: Path, target: Path, options: argparse.Namespace) -> int:
    """Make the folder, or nothing. Returns the bytes of its tensors. Raises StartupError."""
    model = open_model(EngineConfig(model=str(source), weights="dense"), open_device("cpu"))
    if model.weights is None or model.config.quantization is not None:
        raise StartupError(f"{source} has {'no' if model.weights is None else 'already quantised'} weights")
    kinds = {model.weights.dense(name).dtype for name in ("layers.0.attn_norm", "layers.0.q")}
    dtype = torch.float16 if torch.float16 in kinds else torch.bfloat16
    how = Options(options.group_size, not options.asymmetric, dtype)
    if options.gptq is None:
        rounded = nearest(model, how)
    else:
        ids = load_text_model(source).encode(options.gptq.read_text("utf-8")[:_CHARACTERS], add_special_tokens=False)
        ids, step = ids[: options.calibration_tokens], min(options.window, len(ids))
        rounded = calibrated(model, source, [ids[n : n + step] for n in range(0, len(ids), step)], how, options.threads)
    bar = Progress(TextColumn("quantising"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn())
    parent = target.resolve().parent
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{target.name}.") as name, bar:
        folder, task = Path(name) / "model", bar.add_task("", total=elements(model.weights))
        folder.mkdir()
        tensors = stored(model, rounded, dtype, lambda count: bar.advance(task, count))
        size = write_tensors(folder, tensors)
        names = {"quantization_config": config_entry(how, options.gptq is not None)}
        write_rest(source, folder, model, names | {"dtype": str(dtype).removeprefix("torch.")})
        folder.rename(target)
    return size


def elements(weights: Weights) -> int:
    return sum(torch.Size(shape).numel() for shape in weights.shapes.values())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="IN", type=Path)
    parser.add_argument("target", metavar="OUT", type=Path)
    parser.add_argument("--group-size", type=int, default=128, help="weights that share a scale; -1: a whole row")
    parser.add_argument("--asymmetric", action="store_true", help="a zero point per group")
    parser.add_argument("--gptq", metavar="TEXT", type=Path, help="calibrate on this text")
    parser.add_argument("--calibration-tokens", type=int, default=32768, help="of that text, at most")
    parser.add_argument("--text", type=Path, default=DATA / "public-domain.txt", help="for the perplexity")
    parser.add_argument("--no-perplexity", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096, help="of --text, at most")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        if options.target.exists():
            raise StartupError(f"{options.target} is there already")
        if options.group_size != -1 and (options.group_size <= 0 or options.group_size % 32):
            raise StartupError(f"--group-size {options.group_size} is neither a multiple of 32 nor -1")
        ids: list[int] = []
        if not options.no_perplexity:
            text = options.text.read_text("utf-8")[:_CHARACTERS]
            ids = load_text_model(options.source).encode(text, add_special_tokens=False)[: options.tokens]
            before = perplexity(options.source, ids, options)
        size = quantize(options.source, options.target, options)
        print(f"{options.target}: {size:,} bytes of tensors")
        if ids:
            after = perplexity(options.target, ids, options)
            change, runs = (after - before).double(), runs_of((after - before).double())
            error = (runs.std() / len(runs) ** 0.5).item() if len(runs) > 1 else 0.0
            figures = [losses.double().mean().exp().item() for losses in (before, after)]
            print(
                f"perplexity of {options.text.name}, {len(ids)} tokens: {figures[0]:.3f} before, "
                f"{figures[1]:.3f} after ({change.mean().expm1().item():+.2%} ± {error:.2%})"
            )
    except (StartupError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
