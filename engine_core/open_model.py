"""A model file or folder: opened and checked, then its decoder loaded."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_core.device import compute_dtype, free_memory
from engine_core.kv_store import outlier_layers, parse_layers
from engine_core.model.config import ModelConfig, from_gguf, load_model_config
from engine_core.model.decoder import Decoder
from engine_core.model.dummy import DummyWeights
from engine_core.model.gguf_file import GGUFFile
from engine_core.model.quantized import Form, LinearMaker, resolve_weights
from engine_core.model.reading import ReadAhead, staging
from engine_core.model.weights import Weights, check_shapes, expected_shapes
from engine_core.model.weights_gguf import GGUFWeights
from engine_core.model.weights_safetensors import SafetensorsWeights
from kernels.kv_format import BlockLayout, KVShape, block_layout, kv_codecs, resolve_kv_dtype
from protocol.config import EngineConfig
from protocol.errors import StartupError

_GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))  # weights that make one linear layer


@dataclass(frozen=True)
class OpenModel:
    """A model file that was checked, not yet loaded. `weights` is None for a folder with only a config.json."""

    config: ModelConfig
    weights: Weights | None
    rope_divisors: Tensor | None
    vocab_size: int  # of the tokenizer, if that is smaller than the model's padded one
    maker: LinearMaker
    kv_layout: BlockLayout
    kv_layouts: tuple[BlockLayout, ...]  # of all formats
    kv_16bit_layers: str  # in which 8-bit formats keep K in 16 bits
    free: int  # bytes on the device
    total: int


def open_model(config: EngineConfig, device: torch.device, memory: tuple[int, int] | None = None) -> OpenModel:
    """Read config and tensor list of `config.model`, and check them. Raises StartupError.

    `memory` is free and total bytes of a device to plan for; by default, those of `device`.
    """
    path = Path(config.model)
    if not path.exists():
        raise StartupError(f"no such model: {path}")
    free, total = memory or free_memory(device)
    dtype = compute_dtype(config.dtype, device)
    weights: Weights | None = None
    divisors, tokens = None, 0
    if path.is_dir() or config.load_format == "dummy":
        model = load_model_config(path)
        if config.load_format == "dummy":
            weights = DummyWeights(model, device, dtype)
        elif any(path.glob("*.safetensors*")):
            weights = SafetensorsWeights(path, model)
        tokens = _tokenizer_size(path / "tokenizer.json")
    else:
        file = GGUFFile(path)
        model = from_gguf(file)
        weights = gguf = GGUFWeights(file, model)
        divisors, tokens = gguf.rope_divisors, file.array_length("tokenizer.ggml.tokens")
    if weights is not None:
        model = _check_weights(model, weights)
    four_bit = any(map(weights.group_size, weights.shapes)) if weights is not None else model.quantization is not None
    if device.type == "cuda" and path.is_file():
        four_bit = False  # no kernel of ours knows GGUF's minima
    mode = resolve_weights(config.weights, dtype, device, four_bit)
    maker = LinearMaker(mode, dtype, device)
    if weight_bytes(model, weights, maker) > min(free, config.gpu_memory or free) // 2:
        maker = LinearMaker(mode, dtype, device, keep_dense=False)
    layout, layouts, wide = _kv_layouts(config, model, weights, dtype)
    vocab_size = min(tokens or model.vocab_size, model.vocab_size)
    return OpenModel(model, weights, divisors, vocab_size, maker, layout, layouts, wide, free, total)


def load_decoder(model: OpenModel, path: str, progress: Callable[[int, int], None]) -> Decoder:
    """Load the weights of the model at `path`. `progress` gets bytes done and in total. Raises StartupError."""
    weights, done = model.weights, 0
    if weights is None:
        raise StartupError(f"{path} has a config.json but no weights (--load-format dummy runs it on random ones)")
    total = weights.total_bytes

    def loaded(count: int) -> None:
        nonlocal done
        done += count
        ahead.loaded(count)
        progress(done, total)

    in_order = [name for name in expected_shapes(model.config) if name in weights.shapes]  # as the decoder reads
    pieces = [(partial(weights.will_need, name), weights.bytes_of(name)) for name in in_order]
    try:
        with torch.inference_mode(), ReadAhead(pieces) as ahead:
            return Decoder(model.config, weights, model.maker, model.rope_divisors, loaded)
    finally:
        staging.cache_clear()


def weight_bytes(config: ModelConfig, weights: Weights | None, maker: LinearMaker) -> int:
    """Bytes that the decoder's weights take; from what the config implies if there is no file."""
    shapes = expected_shapes(config)
    linear = [[f"layers.{n}.{name}" for name in group] for n in range(config.num_layers) for group in _GROUPS]
    in_linear = {"head"} | {name for names in linear for name in names}
    vectors = sum(math.prod(shape) for name, shape in shapes.items() if name not in in_linear)

    def form(name: str) -> Form:
        if weights is not None:
            return shapes[name], weights.group_size(name)
        return shapes[name], config.quantization.group_size(shapes[name][1]) if config.quantization else 0

    size = vectors * maker.dtype.itemsize + sum(maker.linear_bytes(list(map(form, names))) for names in linear)
    return size + maker.head_bytes((config.vocab_size, config.hidden_size), config.tied_embeddings)


def _kv_layouts(
    config: EngineConfig, model: ModelConfig, weights: Weights | None, dtype: torch.dtype
) -> tuple[BlockLayout, tuple[BlockLayout, ...], str]:
    """The layout of `--kv-cache-dtype`, those of all formats, and the layers of `--kv-16bit-layers` in words."""
    option, note = config.kv_16bit_layers, ""
    try:
        chosen = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    except ValueError as error:
        raise StartupError(f"--kv-cache-dtype: {error}") from error
    try:
        wide = () if option == "auto" else parse_layers(option, model.num_layers)
    except ValueError as error:
        raise StartupError(f"--kv-16bit-layers: {error}") from error
    if option == "auto" and weights is not None:
        wide = outlier_layers(weights, model.num_layers, model.num_kv_heads)
    elif option == "auto" and model.qkv_bias:
        note = " known: auto looks at the weights"
    shape = KVShape(model.num_layers, model.num_kv_heads, model.head_dim, config.block_size)
    layouts = tuple(block_layout(shape, codec, dtype, wide) for codec in kv_codecs(dtype))
    layout = next(found for found in layouts if found.codec == chosen)
    return layout, layouts, (", ".join(map(str, wide)) or "none") + note


def _check_weights(config: ModelConfig, weights: Weights) -> ModelConfig:
    """Compare with what the config needs; a head in the file wins over tied embeddings."""
    if config.tied_embeddings and "head" in weights.shapes:
        config = replace(config, tied_embeddings=False)
    check_shapes(expected_shapes(config), weights.shapes)
    return config


def _tokenizer_size(path: Path) -> int:
    """Ids that a tokenizer.json knows; 0 if there is none."""
    try:
        content = json.loads(path.read_text("utf-8"))
        return 1 + max(_token_ids(content))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _token_ids(content: dict[str, Any]) -> Iterator[int]:
    vocabulary = content["model"]["vocab"]
    yield from vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    yield from (token["id"] for token in content["added_tokens"])
