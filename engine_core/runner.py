"""The interface between the step loop and whatever computes a step. Implementations: model_runner.py (torch),
null_runner.py (no model). A native CPU step or a CUDA graph runner is one more class of this shape."""

from typing import Protocol

from engine_core.plan import StepPlan, StepResult


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
