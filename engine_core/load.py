"""From a configuration to everything the step loop needs: the runner, the copies, the sizes, what the model is."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_core.capacity import Capacity
from engine_core.runner import LoadedRunner, Runner, Transfer
from engine_core.waker import Waker
from protocol.config import EngineConfig


@dataclass(frozen=True)
class Engine:
    """What `load` gives the core."""

    runner: Runner
    transfer: Transfer | None  # None: nothing is ever swapped
    offload_budget: int  # bytes of host memory for KV at most
    waker: Waker  # set whenever copies have landed
    capacity: Capacity
    vocab_size: int
    eos_token_ids: Sequence[int]
    memory: dict[str, int]  # bytes by use
    kv_cache_dtype: str
    summary: str  # for the start-up line
    overlap: bool = False  # whether steps are planned while others run


def load(config: EngineConfig, progress: Callable[[int, int], None]) -> Engine:
    """Load the model. `progress` hears of bytes done and in all. Raises StartupError."""
    waker = Waker()
    runner = _load_runner(config, progress)
    budget = config.offload_budget
    transfer: Transfer | None = None
    if budget >= runner.block_bytes:
        transfer = runner.open_transfer(budget, waker.set, config.copy_bandwidth_limit)
    capacity = Capacity(
        num_blocks=runner.num_blocks,
        block_size=config.block_size,
        max_context=runner.max_context,
        max_running=config.max_running,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        prefix_cache=config.prefix_cache,
        block_bytes=runner.block_bytes,
    )
    return Engine(
        runner,
        transfer,
        budget,
        waker,
        capacity,
        runner.vocab_size,
        runner.eos_token_ids,
        runner.memory,
        runner.kv_cache_dtype,
        runner.summary,
        overlap=config.overlap and config.device == "cuda",
    )


def _load_runner(config: EngineConfig, progress: Callable[[int, int], None]) -> LoadedRunner:
    if config.device == "null":
        from engine_core.null_runner import NullRunner

        return NullRunner(config)
    if config.device == "cuda":
        since = time.monotonic()
        from engine_core.cuda_runner import load_cuda_runner

        return load_cuda_runner(config, progress, since)
    # How long an OpenMP thread spins at a barrier before it sleeps. libgomp's own 300,000 rounds stall a step as soon
    # as another process wants the core (300 tokens/s became 23); without any, waking threads takes half of a step.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    # oneDNN and torch's binding to it each keep the last 1,024 products by number of rows, with their code and scratch:
    # 1 GB after some minutes of prompts of all lengths.
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "256")
    from engine_core.model_runner import load_runner

    return load_runner(config, progress)
