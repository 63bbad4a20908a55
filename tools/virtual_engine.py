"""The real scheduler in virtual time: a step and a copy take what a cost model says.

Machines. A step takes `step + row * decode rows + token * prefill tokens + read * context tokens of decode rows +
attend * (prefill tokens x context tokens before them)`; a group of copies `latency + bytes / bandwidth`. A machine that
was measured (tools/fit_machine.py) has a curve over decode rows instead of `step` and `row`.

h200-3b: Qwen2.5-3B, BF16, one H200. step, row: vLLM 0.26.0's 2.98, 3.12 and 3.88 ms a token at 1, 32 and 128 requests
(32 x 8k: the model says 5.4, measured 5.40 ms). token: its 65,536 prompt tokens in 0.95 s (2,048-token steps). read:
36,864 bytes at 4.3 TB/s. attend: 4 x 36 layers x 2,048 flop at 400 TFLOP/s. Copies: 48 GB/s each when both directions
are busy, 55 alone (PCIe 5 x16, pinned), 20 us a group.

rtx3050-3b: Qwen2.5-3B, W4A16, RTX 3050 Laptop. No run to fit, so rooflines: the 10.7 ms that reading the weights takes
at 192 GB/s, 36,864 bytes a context token at the same, 6.2 GFLOP a token at 12 TFLOP/s, each at 60 %. A row of decode is
a tenth of a prefill token, as weights are read anyway. Copies: 6.8 GB/s (1.77 MB came back in 0.26 ms), 100 us a group.
"""

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from engine_core.capacity import Capacity
from engine_core.plan import Copy, Landed, StepPlan, StepResult
from engine_core.request import Request
from engine_core.scheduler import Scheduler
from protocol.messages import Finish, SamplingParams
from tools.traces import TraceRequest

EOS = 1
FIRST_TOKEN = 2
COPY_GROUP = 32  # blocks that land together, as in engine_core/transfer.py
STUCK_SECONDS = 10.0
_SAMPLING = SamplingParams()


@dataclass(frozen=True)
class Machine:
    """A cost model. Seconds, bytes."""

    step: float
    row: float
    token: float
    read: float
    attend: float
    latency: float
    bandwidth: float  # one direction, alone
    duplex: float  # one direction while the other is busy
    block_bytes: int
    prefill_chunk_tokens: int
    max_running: int
    block_size: int = 16
    curve: tuple[tuple[int, float], ...] = ()  # of (decode rows, seconds), from 0 rows on; between them it is straight

    def with_block_size(self, block_size: int) -> "Machine":
        """The same machine with blocks of so many tokens."""
        block_bytes = self.block_bytes * block_size // self.block_size
        return replace(self, block_size=block_size, block_bytes=block_bytes)

    def step_seconds(self, plan: StepPlan) -> float:
        """How long the forward pass takes."""
        seconds = self._decode_seconds(len(plan.decodes)) + self.read * sum(row.start for row in plan.decodes)
        for row in plan.prefills:
            count = len(row.tokens)
            seconds += count * (self.token + self.attend * (row.start + count / 2))
        return seconds

    def _decode_seconds(self, rows: int) -> float:
        if not self.curve:
            return self.step + self.row * rows
        place = min(max(1, bisect_left(self.curve, (rows,))), len(self.curve) - 1)
        (low, before), (high, after) = self.curve[place - 1], self.curve[place]
        seconds = before + (after - before) * (rows - low) / (high - low)
        return seconds if rows <= high else max(after, seconds)  # where nothing was measured, more rows are no faster


MACHINES = {
    "h200-3b": Machine(2.95e-3, 6e-6, 13.8e-6, 8.6e-9, 0.74e-9, 20e-6, 55e9, 48e9, 589_824, 2048, 128),
    "rtx3050-3b": Machine(17.8e-3, 86e-6, 0.86e-3, 0.32e-6, 41e-9, 100e-6, 6.8e9, 6.8e9, 589_824, 512, 16),
}


class CopyLanes:
    """One lane for each direction; groups of copies land in order."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free_at = {True: 0.0, False: 0.0}
        self._landings: list[tuple[float, int, Landed]] = []
        self._count = 0
        self.busy_seconds = 0.0
        self.blocks = 0

    def start(self, copies: Sequence[Copy], now: float) -> None:
        """Queue copies."""
        for out in (True, False):
            some = [copy for copy in copies if copy.out == out]
            for first in range(0, len(some), COPY_GROUP):
                self._queue(some[first : first + COPY_GROUP], out, now)

    def _queue(self, group: list[Copy], out: bool, now: float) -> None:
        started = max(now, self._free_at[out])
        bandwidth = self._machine.duplex if self._free_at[not out] > started else self._machine.bandwidth
        seconds = self._machine.latency + len(group) * self._machine.block_bytes / bandwidth
        self._free_at[out] = started + seconds
        self.busy_seconds += seconds
        self.blocks += len(group)
        self._count += 1
        heapq.heappush(self._landings, (started + seconds, self._count, Landed(group, True, seconds)))

    @property
    def next_landing(self) -> float:
        """When the next group lands."""
        return self._landings[0][0] if self._landings else float("inf")

    @property
    def last_landing(self) -> float:
        """When all have landed."""
        return max((landing[0] for landing in self._landings), default=0.0)

    def landed(self, now: float) -> Iterator[Landed]:
        """Take what has landed by now."""
        while self._landings and self._landings[0][0] <= now:
            yield heapq.heappop(self._landings)[2]


@dataclass
class Tally:
    """What a run gave. Times in seconds."""

    finished: int = 0
    ended: float = 0.0
    tokens: int = 0  # of requests that finished
    wasted_tokens: int = 0  # computed again
    aborted: int = 0
    steps: int = 0
    stalled: float = 0.0  # nothing could run and nothing was on its way
    ttft: list[float] = field(default_factory=list)
    gaps: dict[bool, "array[float]"] = field(default_factory=lambda: {True: array("f"), False: array("f")})
    longest: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    needed: list[tuple[int, float]] = field(default_factory=list)  # (blocks in use, for how long), if watched


class VirtualEngine:
    """Runs a trace through a scheduler. What a request's tokens are doesn't matter; its answer ends as in the trace."""

    def __init__(self, scheduler: Scheduler, machine: Machine, max_tokens: int, watch: bool = False) -> None:
        """`max_tokens` is what each client asks for; 0: what it gets. `watch` notes how many blocks are in use."""
        self.scheduler, self.machine, self._max_tokens, self._watch = scheduler, machine, max_tokens, watch
        self.now = 0.0
        self.tally = Tally()
        self.lanes = CopyLanes(machine)
        self._waits = getattr(scheduler, "waits", False)
        self._answers: dict[int, int] = {}
        self._tokens: dict[int, array[float]] = {}  # when each came

    def run(self, trace: Iterable[TraceRequest]) -> Tally:
        """Run to the end. Arrivals are in order."""
        arrivals = iter(trace)
        coming = next(arrivals, None)
        while coming is not None or self.scheduler.has_work:
            while coming is not None and coming.arrival <= self.now:
                self._add(coming)
                coming = next(arrivals, None)
            self._land()
            plan = self.scheduler.schedule(self.now)
            self.scheduler.pauses.clear()
            if plan is not None and plan.copies:
                self.lanes.start(plan.copies, self.now)
                if self._waits:
                    self.now = max(self.now, self.lanes.last_landing)
                    self._land()
            if plan is not None and plan.num_tokens:
                self._compute(plan)
            else:
                self._wait(coming.arrival if coming is not None else float("inf"))
        self.tally.ended = self.now
        return self.tally

    def _land(self) -> None:
        for landed in self.lanes.landed(self.now):
            self.scheduler.land(landed, self.now)

    def _wait(self, arrival: float) -> None:
        event = min(arrival, self.lanes.next_landing)
        if self.scheduler.has_work and self.lanes.next_landing == float("inf"):
            event = min(event, self.now + 1e-3)
            self.tally.stalled += event - self.now
            assert self.tally.stalled < STUCK_SECONDS, "work is waiting and nothing progresses"
        self.now = max(self.now, event)

    def _add(self, request: TraceRequest) -> None:
        capacity = self.scheduler.capacity
        limit = capacity.answer_limit(request.prompt_tokens, self._max_tokens or request.answer_tokens)
        new = Request(request.number, [0] * request.prompt_tokens, _SAMPLING, limit, request.arrival)
        new.digests = request.digests(capacity.block_size)
        self._answers[request.number] = min(limit, request.answer_tokens)
        self.scheduler.add(new)

    def _compute(self, plan: StepPlan) -> None:
        seconds = self.machine.step_seconds(plan)
        self.now += seconds
        tally, requests = self.tally, self.scheduler.requests
        tally.steps += 1
        if self._watch:
            tally.needed.append((self.scheduler.pool.num_blocks - self.scheduler.pool.available, seconds))
        for row in plan.prefills:
            tally.wasted_tokens += max(
                0, min(requests[row.request_id].reached, row.start + len(row.tokens)) - row.start
            )
        answers = self._answers
        tokens = [
            EOS if row.position + 1 >= answers[row.request_id] else FIRST_TOKEN + row.request_id
            for row in (*plan.decodes, *plan.prefills)
            if row.samples
        ]
        known = len(requests)
        now, times = self.now, self._tokens
        for outcome in self.scheduler.commit(plan, StepResult(tokens), now, seconds):
            request = outcome.request
            if request.id in times:
                times[request.id].append(now)
            else:
                times[request.id] = array("d", (now,))
                tally.ttft.append(now - request.arrival)
            if outcome.finish is not Finish.NONE:
                known -= 1
                self._count(request)
        assert known == len(requests)

    def _count(self, request: Request) -> None:
        tally, times = self.tally, self._tokens.pop(request.id)
        del self._answers[request.id]
        was_preempted = request.swaps + request.recomputes > 0
        gaps = array("f", map(float.__sub__, times[1:], times[:-1]))
        tally.gaps[was_preempted] += gaps
        if gaps:
            tally.longest[was_preempted].append(max(gaps))
        tally.finished += 1
        tally.tokens += len(request.output)


def capacity_of(machine: Machine, num_blocks: int, max_context: int, prefix_cache: bool = True) -> Capacity:
    """A machine's limits, with so many blocks."""
    return Capacity(
        num_blocks,
        machine.block_size,
        max_context,
        machine.max_running,
        machine.prefill_chunk_tokens,
        prefix_cache,
        machine.block_bytes,
    )
