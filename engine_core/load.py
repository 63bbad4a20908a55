"""From a configuration to everything the step loop needs: the runner, the sizes, what the model is."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_core.runner import LoadedRunner, Runner
from engine_core.scheduler import Capacity
from protocol.config import EngineConfig


@dataclass(frozen=True)
class Engine:
    """What `load` gives the core."""

    runner: Runner
    capacity: Capacity
    vocab_size: int
    eos_token_ids: Sequence[int]
    memory: dict[str, int]  # bytes by use
    kv_cache_dtype: str
    summary: str  # for the start-up line


def load(config: EngineConfig, progress: Callable[[int, int], None]) -> Engine:
    """Load the model. `progress` hears of bytes done and in all. Raises StartupError."""
    if config.device == "null":
        from engine_core.null_runner import NullRunner

        runner: LoadedRunner = NullRunner(config)
    else:
        # How long an OpenMP thread spins at a barrier before it sleeps. libgomp's own 300,000 rounds stall a step as
        # soon as another process wants the core (300 tokens/s became 23); without any, waking threads takes half of a
        # step.
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
        from engine_core.model_runner import load_runner

        runner = load_runner(config, progress)
    capacity = Capacity(
        num_blocks=runner.num_blocks,
        block_size=config.block_size,
        max_context=runner.max_context,
        max_running=config.max_running,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        prefix_cache=config.prefix_cache,
    )
    return Engine(
        runner,
        capacity,
        runner.vocab_size,
        runner.eos_token_ids,
        runner.memory,
        runner.kv_cache_dtype,
        runner.summary,
    )
