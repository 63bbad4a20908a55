"""What takes how much memory. The runner allocates what `plan_memory` says, and `pagetide plan` prints it."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_core.device import compute_dtype, free_memory, open_device
from engine_core.kv_store import outlier_layers, parse_layers
from engine_core.model.config import ModelConfig, from_gguf, load_model_config
from engine_core.model.dummy import DummyWeights
from engine_core.model.gguf_file import GGUFFile
from engine_core.model.quantized import Form, LinearMaker, resolve_weights
from engine_core.model.weights import Weights, check_shapes, expected_shapes
from engine_core.model.weights_gguf import GGUFWeights
from engine_core.model.weights_safetensors import SafetensorsWeights
from kernels.kv_format import BlockLayout, KVShape, block_layout, kv_codecs, resolve_kv_dtype
from protocol.config import EngineConfig
from protocol.errors import StartupError

_CPU_POOL = 4 << 30  # bytes of the pool at most if nothing is asked for: a CPU engine shares the machine
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


@dataclass(frozen=True)
class KVCapacity:
    """The pool that a format would give."""

    name: str
    block_bytes: int
    block_size: int
    num_blocks: int

    @property
    def pool(self) -> int:
        """Bytes of the KV pool."""
        return self.num_blocks * self.block_bytes

    @property
    def max_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def bytes_per_token(self) -> int | float:
        """KV bytes of one token, exactly: a float only if blocks aren't a multiple of it."""
        whole, rest = divmod(self.block_bytes, self.block_size)
        return self.block_bytes / self.block_size if rest else whole

    def by_name(self) -> dict[str, str | int | float]:
        """For `pagetide plan`."""
        return {
            "kv_cache_dtype": self.name,
            "kv_block_bytes": self.block_bytes,
            "kv_bytes_per_token": self.bytes_per_token,
            "num_blocks": self.num_blocks,
            "max_tokens": self.max_tokens,
        }


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use, and what they give."""

    total: int
    free: int  # at start
    weights: int
    workspace: int
    max_context: int
    kv: KVCapacity
    formats: tuple[KVCapacity, ...]  # what each would give in its place
    kv_16bit_layers: str

    def requests_of(self, tokens: int) -> int:
        """How many requests of `tokens` tokens, prompt and answer, the pool holds at once."""
        return self.kv.num_blocks // math.ceil(tokens / self.kv.block_size)

    def by_use(self) -> dict[str, int]:
        """For status and metrics."""
        return {
            "total": self.total,
            "free_at_start": self.free,
            "weights": self.weights,
            "workspace": self.workspace,
            "kv_pool": self.kv.pool,
            "kv_block": self.kv.block_bytes,
        }

    def summary(self) -> str:
        """One line for the log."""
        uses = (("total", self.total), ("free", self.free), ("weights", self.weights), ("workspace", self.workspace))
        parts = [f"{name} {_mib(size)}" for name, size in uses]
        pool = (
            f"{self.kv.name} KV pool {_mib(self.kv.pool)} = {self.kv.num_blocks} blocks = {self.kv.max_tokens} tokens"
        )
        formats = ", ".join(f"{kv.name} {kv.bytes_per_token:,} ({kv.max_tokens:,})" for kv in self.formats)
        parts += [pool, f"context {self.max_context}", f"K in 16 bits in layers: {self.kv_16bit_layers}"]
        return f"{', '.join(parts)}; bytes per token (tokens) by format: {formats}"


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
    if _weight_bytes(model, weights, maker) > min(free, config.gpu_memory or free) // 2:
        maker = LinearMaker(mode, dtype, device, keep_dense=False)
    layout, layouts, wide = _kv_layouts(config, model, weights, dtype)
    vocab_size = min(tokens or model.vocab_size, model.vocab_size)
    return OpenModel(model, weights, divisors, vocab_size, maker, layout, layouts, wide, free, total)


def plan_memory(model: OpenModel, config: EngineConfig) -> MemoryPlan:
    """Divide the device's memory. Raises StartupError, with all figures, if one context doesn't fit in the pool."""
    limit = model.config.max_context
    if config.max_cache > limit:
        raise StartupError(f"--max-cache {config.max_cache} is above the model's context of {limit} tokens")
    context = config.max_cache or limit
    weights = _weight_bytes(model.config, model.weights, model.maker)
    needed = math.ceil(context / config.block_size)
    budget = min(config.gpu_memory or model.free, model.free) - weights

    def capacity(layout: BlockLayout) -> KVCapacity:
        left, block = max(budget - _workspace(model, config, context, layout), 0), layout.image_bytes
        if config.num_blocks:
            blocks = config.num_blocks
        elif config.gpu_memory or model.maker.device.type != "cpu":
            blocks = left // block
        else:
            pool = max(min(_CPU_POOL, model.free // 4), needed * block)
            blocks = min(config.max_running * needed, min(pool, left) // block)
        return KVCapacity(layout.codec.name, block, config.block_size, blocks)

    plan = MemoryPlan(
        total=model.total,
        free=model.free,
        weights=weights,
        workspace=_workspace(model, config, context, model.kv_layout),
        max_context=context,
        kv=capacity(model.kv_layout),
        formats=tuple(map(capacity, model.kv_layouts)),
        kv_16bit_layers=model.kv_16bit_layers,
    )
    left = budget - plan.workspace
    if plan.kv.num_blocks < needed or plan.kv.pool > left:
        raise StartupError(refusal(plan, config, left, needed))
    return plan


def describe_plan(config: EngineConfig, request_tokens: int = 0) -> dict[str, Any]:
    """The plan of `config` by name, for `pagetide plan`. A `request_tokens` of 0 counts requests of the whole context.

    With `--gpu-memory`, it is a plan for a device with that much free. Names that end in `_bytes` are bytes. Raises
    StartupError.
    """
    card = (config.gpu_memory, config.gpu_memory) if config.gpu_memory else None
    model = open_model(config, open_device("cpu" if config.device == "null" else config.device), card)
    plan = plan_memory(model, config)
    tokens = request_tokens or plan.max_context
    return {
        "model": config.name_for_clients(Path(config.model).stem),
        "total_bytes": plan.total,
        "free_at_start_bytes": plan.free,
        "weights_bytes": plan.weights,
        "weights_kept": f"{model.maker.mode}, {str(model.maker.dtype).removeprefix('torch.')}",
        "workspace_bytes": plan.workspace,
        "kv_pool_bytes": plan.kv.pool,
        "kv_16bit_layers": plan.kv_16bit_layers,
        "block_size": plan.kv.block_size,
        **plan.kv.by_name(),
        "max_context": plan.max_context,
        "request_tokens": tokens,
        "requests_at_once": plan.requests_of(tokens),
        "formats": [kv.by_name() for kv in plan.formats],
    }


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


def _weight_bytes(config: ModelConfig, weights: Weights | None, maker: LinearMaker) -> int:
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


def _workspace(model: OpenModel, config: EngineConfig, context: int, layout: BlockLayout) -> int:
    """Bytes of a step's largest tensors: activations, logits, one layer's gathered KV with its row indices.

    8-bit KV is gathered and widened: to the compute dtype, under a scale to float32 before. On a GPU, where nothing is
    gathered, this is an estimate to plan with before a warm-up measures.
    """
    shape = model.config
    rows = config.prefill_chunk_tokens + config.max_running
    width = 3 * shape.hidden_size + 3 * shape.intermediate_size + 3 * shape.head_dim * shape.num_heads
    logits = 3 * config.max_running * shape.vocab_size * 4  # float32; the sampler sorts a copy
    step = rows * width * model.maker.dtype.itemsize + logits
    if model.maker.device.type == "cuda":
        return step
    codec = layout.codec
    element = model.maker.dtype.itemsize + (codec.dtype == torch.uint8) + 4 * codec.has_scale
    gathered = 2 * context * shape.num_kv_heads * (shape.head_dim * element + 8 + 8 * codec.has_scale)
    scores = 128 * shape.num_heads * context * 4  # a tile of a chunk's queries
    return step + gathered + scores


def _check_weights(config: ModelConfig, weights: Weights) -> ModelConfig:
    """Compare with what the config needs; a head in the file wins over tied embeddings."""
    if config.tied_embeddings and "head" in weights.shapes:
        config = replace(config, tied_embeddings=False)
    check_shapes(expected_shapes(config), weights.shapes)
    return config


def refusal(plan: MemoryPlan, config: EngineConfig, left: int, needed: int) -> str:
    """Why a plan is refused that has `left` bytes for the pool, and needs `needed` blocks: figures and options."""
    if config.num_blocks:
        option = "--num-blocks is too low" if config.num_blocks < needed else "lower --num-blocks"
    else:
        option = "raise --gpu-memory, or lower it with" if config.gpu_memory else "lower it with"
        option += " --max-cache, --max-running or --prefill-chunk-tokens"
    return (
        f"the KV pool can't hold one context of {plan.max_context} tokens ({_mib(needed * plan.kv.block_bytes)}): "
        f"total {_mib(plan.total)}, free at start {_mib(plan.free)}, weights {_mib(plan.weights)}, workspace "
        f"{_mib(plan.workspace)}, left for the pool {_mib(max(left, 0))} = {plan.kv.num_blocks} blocks, "
        f"needed {needed}; {option}"
    )


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


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
