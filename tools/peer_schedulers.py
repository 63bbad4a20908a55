"""What other engines do when the KV pool is full, as small variations of the real scheduler.

They are kinder to the peers than the originals: prompts get their blocks at once instead of chunk by chunk (less
thrash than in vLLM V1), a whole slot's copy runs at full bandwidth, and an abort takes one request instead of all.
"""

from collections.abc import Callable

from engine_core.capacity import Capacity
from engine_core.request import NOWHERE, Block, Motion, Request, State
from engine_core.residency import Residency
from engine_core.scheduler import Scheduler
from engine_core.swap import SwapPolicy

RECOMPUTE = SwapPolicy("recompute", yielding=0.0)


class RecomputeLast(Scheduler):
    """vLLM V1: first come, first served; without a place for a token the last one in loses its KV."""

    def _has_place(self, needed: int) -> bool:
        return len(self.running) < self.capacity.max_running and needed <= self.pool.available


class ReserveAll(Scheduler):
    """mini-sglang: a request comes in when its prompt and `max_tokens` fit beside those of all others."""

    def _needs(self, request: Request, promised: int) -> tuple[list[Block], int]:
        found, needed = super()._needs(request, promised)
        return found, needed + self._to_come(request) - self.residency.block_count(request.known)

    def _has_place(self, needed: int) -> bool:
        reserved = sum(self._to_come(other) - len(other.table) for other in self.running)
        return len(self.running) < self.capacity.max_running and needed + reserved <= self.pool.available

    def _to_come(self, request: Request) -> int:
        return self.residency.block_count(len(request.prompt) + request.max_tokens)


class AbortLast(RecomputeLast):
    """llama.cpp: without a place for a token a request ends with an error; the last one, here."""

    def __init__(self, capacity: Capacity, eos: list[int], policy: SwapPolicy) -> None:
        super().__init__(capacity, eos, policy, AbortingResidency)
        assert isinstance(self.residency, AbortingResidency)
        self.residency.abort = self.abort


class AbortingResidency(Residency):
    """Ends a request instead of taking its blocks."""

    abort: Callable[[int], object]

    def preempt(self, request: Request) -> None:
        """End it."""
        self.counts.recomputed += 1
        self.abort(request.id)


class WholeSlotSwap(Scheduler):
    """Forks of llama.cpp: the last one's whole table goes to host memory, the step loop waits for it (`waits`).

    It comes back in its turn. Nobody displaces anybody to take turns, and no copy is kept or shared.
    """

    waits = True
    POLICY = SwapPolicy("swap", max_pause=1e9, yielding=0.0, overcommit=0.0, lookahead=0)

    def __init__(self, capacity: Capacity, eos: list[int], policy: SwapPolicy) -> None:
        super().__init__(capacity, eos, policy, WholeSlotResidency)

    def _swap_ahead(self) -> None:
        pass

    def _grow(self, request: Request) -> bool:
        """Preempt the last one, not one that has had its share: nobody takes turns."""
        while request.is_decoding and len(request.table) * self.capacity.block_size <= request.computed:
            if self.pool.available:
                request.table += self.pool.allocate(1)
                request.blocks.append(request.table[-1].device)
            elif self.pool.coming:
                return False
            else:
                resident = [r for r in self.running if r.state in (State.PREFILL, State.DECODE)]
                self.residency.preempt(resident[-1])
        return request.is_decoding


class WholeSlotResidency(Residency):
    """Forgets the images in the host pool before it copies a table out."""

    def swap_out(self, request: Request) -> bool:
        """See `Residency`."""
        for block in request.table:
            if block.holders == 1 and not block.claims and block.host != NOWHERE and block.motion is Motion.STILL:
                self.pool.spoil(block)
        return super().swap_out(request)
