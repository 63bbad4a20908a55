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
from engine_core.model.config import ModelConfig, from_gguf, load_model_config
from engine_core.model.gguf_file import GGUFFile
from engine_core.model.quantized import LinearMaker, resolve_weights
from engine_core.model.weights import Weights, check_shapes, expected_shapes
from engine_core.model.weights_gguf import GGUFWeights
from engine_core.model.weights_safetensors import SafetensorsWeights
from kernels.kv_format import BlockLayout, KVShape, block_layout, resolve_kv_dtype
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
    free: int  # bytes on the device
    total: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use, and what they give."""

    total: int
    free: int  # at start
    weights: int
    workspace: int
    block_bytes: int
    block_size: int
    num_blocks: int
    max_context: int
    kv_name: str

    @property
    def pool(self) -> int:
        """Bytes of the KV pool."""
        return self.num_blocks * self.block_bytes

    @property
    def max_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token."""
        return self.block_bytes // self.block_size

    def requests_of(self, tokens: int) -> int:
        """How many requests of `tokens` tokens, prompt and answer, the pool holds at once."""
        return self.num_blocks // math.ceil(tokens / self.block_size)

    def by_use(self) -> dict[str, int]:
        """For status and metrics."""
        return {
            "total": self.total,
            "free_at_start": self.free,
            "weights": self.weights,
            "workspace": self.workspace,
            "kv_pool": self.pool,
            "kv_block": self.block_bytes,
        }

    def summary(self) -> str:
        """One line for the log."""
        uses = (("total", self.total), ("free", self.free), ("weights", self.weights), ("workspace", self.workspace))
        parts = [f"{name} {_mib(size)}" for name, size in uses]
        pool = f"{self.kv_name} KV pool {_mib(self.pool)} = {self.num_blocks} blocks = {self.max_tokens} tokens"
        return ", ".join((*parts, pool, f"context {self.max_context}"))


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
    if path.is_dir():
        model = load_model_config(path)
        if any(path.glob("*.safetensors*")):
            weights = SafetensorsWeights(path)
        tokens = _tokenizer_size(path / "tokenizer.json")
    else:
        file = GGUFFile(path)
        model = from_gguf(file)
        weights = gguf = GGUFWeights(file, model)
        divisors, tokens = gguf.rope_divisors, file.array_length("tokenizer.ggml.tokens")
    if weights is not None:
        model = _check_weights(model, weights)
    four_bit = weights is not None and any(map(weights.has_4bit, weights.shapes))
    mode = resolve_weights(config.weights, dtype, device, four_bit)
    maker = LinearMaker(mode, dtype, device)
    if _weight_bytes(model, weights, maker) > min(free, config.gpu_memory or free) // 2:
        maker = LinearMaker(mode, dtype, device, keep_dense=False)
    shape = KVShape(model.num_layers, model.num_kv_heads, model.head_dim, config.block_size)
    try:
        layout = block_layout(shape, resolve_kv_dtype(config.kv_cache_dtype, dtype), dtype)
    except ValueError as error:
        raise StartupError(f"--kv-cache-dtype: {error}") from error
    vocab_size = min(tokens or model.vocab_size, model.vocab_size)
    return OpenModel(model, weights, divisors, vocab_size, maker, layout, free, total)


def plan_memory(model: OpenModel, config: EngineConfig) -> MemoryPlan:
    """Divide the device's memory. Raises StartupError, with all figures, if one context doesn't fit in the pool."""
    limit = model.config.max_context
    if config.max_cache > limit:
        raise StartupError(f"--max-cache {config.max_cache} is above the model's context of {limit} tokens")
    context = config.max_cache or limit
    weights = _weight_bytes(model.config, model.weights, model.maker)
    workspace = _workspace(model, config, context)
    block = model.kv_layout.image_bytes
    needed = math.ceil(context / config.block_size)
    budget = min(config.gpu_memory or model.free, model.free)
    left = budget - weights - workspace
    if config.num_blocks:
        blocks = config.num_blocks
    elif config.gpu_memory or model.maker.device.type != "cpu":
        blocks = max(left, 0) // block
    else:
        pool = max(min(_CPU_POOL, model.free // 4), needed * block)
        blocks = min(config.max_running * needed, min(pool, max(left, 0)) // block)
    plan = MemoryPlan(
        total=model.total,
        free=model.free,
        weights=weights,
        workspace=workspace,
        block_bytes=block,
        block_size=config.block_size,
        num_blocks=blocks,
        max_context=context,
        kv_name=model.kv_layout.codec.name,
    )
    if blocks < needed or plan.pool > left:
        raise StartupError(_refusal(plan, config, left, needed))
    return plan


def describe_plan(config: EngineConfig, request_tokens: int = 0) -> dict[str, str | int]:
    """The plan of `config` by name, for `pagetide plan`. A `request_tokens` of 0 counts requests of the whole context.

    With `--gpu-memory`, it is a plan for a device with that much free. Names that end in `_bytes` are bytes. Raises
    StartupError.
    """
    card = (config.gpu_memory, config.gpu_memory) if config.gpu_memory else None
    model = open_model(config, open_device("cpu" if config.device == "null" else config.device), card)
    plan = plan_memory(model, config)
    tokens = request_tokens or plan.max_context
    return {
        "model": config.served_model_name or Path(config.model).stem,
        "total_bytes": plan.total,
        "free_at_start_bytes": plan.free,
        "weights_bytes": plan.weights,
        "weights_kept": f"{model.maker.mode}, {str(model.maker.dtype).removeprefix('torch.')}",
        "workspace_bytes": plan.workspace,
        "kv_pool_bytes": plan.pool,
        "kv_cache_dtype": plan.kv_name,
        "kv_block_bytes": plan.block_bytes,
        "kv_bytes_per_token": plan.bytes_per_token,
        "block_size": plan.block_size,
        "num_blocks": plan.num_blocks,
        "max_tokens": plan.max_tokens,
        "max_context": plan.max_context,
        "request_tokens": tokens,
        "requests_at_once": plan.requests_of(tokens),
    }


def _weight_bytes(config: ModelConfig, weights: Weights | None, maker: LinearMaker) -> int:
    """Bytes that the decoder's weights take; from the shapes that the config implies if there is no file."""
    shapes = expected_shapes(config)
    linear = [[f"layers.{n}.{name}" for name in group] for n in range(config.num_layers) for group in _GROUPS]
    in_linear = {"head"} | {name for names in linear for name in names}
    vectors = sum(math.prod(shape) for name, shape in shapes.items() if name not in in_linear)

    def four_bit(names: list[str]) -> bool:
        return weights is not None and all(map(weights.has_4bit, names))

    size = vectors * maker.dtype.itemsize
    size += sum(maker.linear_bytes([shapes[name] for name in names], four_bit(names)) for names in linear)
    return size + maker.head_bytes((config.vocab_size, config.hidden_size), config.tied_embeddings)


def _workspace(model: OpenModel, config: EngineConfig, context: int) -> int:
    """Bytes of a step's largest tensors: activations, logits, one layer's gathered KV with its row indices."""
    shape = model.config
    rows = config.prefill_chunk_tokens + config.max_running
    width = 3 * shape.hidden_size + 3 * shape.intermediate_size + 3 * shape.head_dim * shape.num_heads
    logits = 3 * config.max_running * shape.vocab_size * 4  # float32; the sampler sorts a copy
    gathered = 2 * context * shape.num_kv_heads * (shape.head_dim * model.maker.dtype.itemsize + 8)
    scores = 128 * shape.num_heads * context * 4  # a tile of a chunk's queries
    return rows * width * model.maker.dtype.itemsize + logits + gathered + scores


def _check_weights(config: ModelConfig, weights: Weights) -> ModelConfig:
    """Compare with what the config needs; a head in the file wins over tied embeddings."""
    if config.tied_embeddings and "head" in weights.shapes:
        config = replace(config, tied_embeddings=False)
    check_shapes(expected_shapes(config), weights.shapes)
    return config


def _refusal(plan: MemoryPlan, config: EngineConfig, left: int, needed: int) -> str:
    if config.num_blocks:
        option = "--num-blocks is too low" if config.num_blocks < needed else "lower --num-blocks"
    else:
        option = "raise --gpu-memory, or lower it with" if config.gpu_memory else "lower it with"
        option += " --max-cache"
    return (
        f"the KV pool can't hold one context of {plan.max_context} tokens ({_mib(needed * plan.block_bytes)}): "
        f"total {_mib(plan.total)}, free at start {_mib(plan.free)}, weights {_mib(plan.weights)}, workspace "
        f"{_mib(plan.workspace)}, left for the pool {_mib(max(left, 0))} = {plan.num_blocks} blocks, "
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
