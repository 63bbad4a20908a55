"""The interface between the step loop and whatever computes a step.

Implementations: model_runner.py (torch) and null_runner.py (no model). A native CPU step or a CUDA graph runner is one
more class of this shape.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine_core.plan import Copy, Landed, StepPlan, StepResult


class StepHandle(Protocol):
    """A step that has been launched."""

    def tokens(self) -> StepResult:
        """Wait for the step (releasing the GIL) and return what it sampled."""
        ...


class Runner(Protocol):
    """Computes steps over a KV pool that it owns."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start the forward pass of `plan`. Steps run in the order of their launch."""
        ...


class Transfer(Protocol):
    """Moves block images between the device pool and a host pool that it owns. Nothing here ever waits for a copy."""

    host_blocks: int  # blocks of the host pool that may be used by now: it is made in the background, slab by slab

    @property
    def poll_interval(self) -> float:
        """Seconds after which to ask for what has landed, where nobody is woken; 0 otherwise."""
        ...

    def start(self, copies: Sequence[Copy]) -> None:
        """Start copies. Each is ordered after all steps launched so far; copies of one direction run in order."""
        ...

    def landed(self) -> list[Landed]:
        """Copies that have ended since the last call, each exactly once."""
        ...

    def close(self) -> None:
        """End the copying. What is in flight may be lost."""
        ...


class LoadedRunner(Runner, Protocol):
    """A runner, and what the rest of the core needs to know of its model and memory."""

    vocab_size: int
    eos_token_ids: list[int]
    max_context: int  # tokens
    num_blocks: int
    kv_cache_dtype: str

    @property
    def block_bytes(self) -> int:
        """Bytes of a block image."""
        ...

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by use."""
        ...

    @property
    def summary(self) -> str:
        """For the start-up line."""
        ...

    def open_transfer(self, budget: int, wake: Callable[[], None], bandwidth_limit: int) -> Transfer:
        """Make a host pool of at most `budget` bytes in the background, and what copies; it calls `wake` at ends.

        `bandwidth_limit` is in bytes per second and direction, 0 for none.
        """
        ...
