"""What takes how much memory. The runner allocates what `plan_memory` says, and `pagetide plan` prints it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_core.device import open_device
from engine_core.open_model import OpenModel, open_model, weight_bytes
from kernels.kv_format import BlockLayout
from protocol.config import EngineConfig
from protocol.errors import StartupError

_CPU_POOL = 4 << 30  # bytes of the pool at most if nothing is asked for: a CPU engine shares the machine


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


def plan_memory(model: OpenModel, config: EngineConfig) -> MemoryPlan:
    """Divide the device's memory. Raises StartupError, with all figures, if one context doesn't fit in the pool."""
    limit = model.config.max_context
    if config.max_cache > limit:
        raise StartupError(f"--max-cache {config.max_cache} is above the model's context of {limit} tokens")
    context = config.max_cache or limit
    weights = weight_bytes(model.config, model.weights, model.maker)
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


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"
