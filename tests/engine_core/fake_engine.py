"""A scheduler's surroundings without a device: a model that computes nothing, copies that land when they are told to.

Token t of a request is a function of its known tokens, so what a row must read is known, and what it reads is checked.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator

from engine_core.capacity import Capacity
from engine_core.plan import UNKNOWN, Copy, Landed, StepPlan, StepResult
from engine_core.request import Request, State
from engine_core.scheduler import Outcome, Scheduler
from engine_core.swap import SwapPolicy
from protocol.messages import SamplingParams

EOS = 7
STEP = 0.01  # seconds
PATIENT = SwapPolicy("swap", max_pause=1e9, min_interval=0.0)  # nobody takes turns
_ids = itertools.count(1)


def make_scheduler(
    num_blocks: int = 64, block_size: int = 4, host_blocks: int = 0, policy: SwapPolicy | None = None, **options: int
) -> Scheduler:
    sizes = {"max_context": 1000, "max_running": 8, "prefill_chunk_tokens": 16} | options
    scheduler = Scheduler(Capacity(num_blocks, block_size, **sizes), [EOS], policy)
    scheduler.pool.grow_host(host_blocks)
    return scheduler


def make_request(scheduler: Scheduler, prompt: list[int], max_tokens: int = 4, **options: object) -> Request:
    limit = scheduler.capacity.answer_limit(len(prompt), max_tokens)
    sampling = options.pop("sampling", SamplingParams(ignore_eos=True))
    return Request(next(_ids), prompt, sampling, limit, options.pop("arrival", 0.0), **options)


def next_token(known: list[int]) -> int:
    return (sum(known) * 31 + len(known)) % 97


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    known = list(prompt)
    for _ in range(max_tokens):
        known.append(next_token(known))
    return known[len(prompt) :]


class FakeEngine:
    """Keeps what was written to each slot of each block, and checks that every row reads exactly its own tokens.

    `delay()` says in how many steps a copy lands, `fails()` whether it fails. A copy's bytes move as late as they can,
    and what it fills is poisoned until then.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        delay: Callable[[], int] = lambda: 1,
        fails: Callable[[], bool] = lambda: False,
        overlap: bool = False,
        spoils: Callable[[], bool] = lambda: False,
    ) -> None:
        """With `overlap`, a step is planned before the tokens of the one before it are known.

        `spoils()` says whether a row's logits are not finite.
        """
        self.scheduler, self._delay, self._fails, self._overlap = scheduler, delay, fails, overlap
        self._spoils = spoils
        self.in_compute: tuple[StepPlan, StepResult] | None = None
        self._sampled: dict[int, int] = {}  # by request id
        self.size = scheduler.capacity.block_size
        self.now = 0.0
        self.steps = 0
        self.device = [[-1] * self.size for _ in range(scheduler.capacity.num_blocks)]
        self.host: dict[int, tuple[int, list[int]]] = {}
        self.in_flight: dict[bool, deque[tuple[Copy, int, list[int]]]] = {True: deque(), False: deque()}
        self.copies: list[Copy] = []  # all that were ever started
        self.plans: list[StepPlan] = []

    def add(self, prompt: list[int], max_tokens: int = 4, **options: object) -> Request:
        request = make_request(self.scheduler, prompt, max_tokens, arrival=self.now, **options)
        self.scheduler.add(request)
        self.scheduler.check()
        return request

    def step(self) -> list[Outcome]:
        """One turn of the step loop."""
        self.now += STEP
        self.steps += 1
        self.land()
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check()
        if plan is None:
            busy = self.in_flight[True] or self.in_flight[False] or self.in_compute
            assert busy or not self.scheduler.has_work, "work is waiting and nothing can run"
            return self._collect()
        self.plans.append(plan)
        self.start(plan.copies)
        outcomes = []
        if self._overlap:
            result = (plan, self.compute(plan)) if plan.num_tokens else None
            outcomes = self._collect()
            self.in_compute = result
        elif plan.num_tokens:
            self.in_compute = plan, self.compute(plan)
            outcomes = self._collect()
        return outcomes

    def _collect(self) -> list[Outcome]:
        if self.in_compute is None:
            return []
        outcomes = self.scheduler.commit(*self.in_compute, self.now, STEP)
        self.in_compute = None
        self.scheduler.check()
        return outcomes

    def run_to_end(self) -> Iterator[list[Outcome]]:
        for _ in range(20_000):
            if not self.scheduler.has_work:
                return
            yield self.step()
        raise AssertionError("no end in sight")

    def finish(self) -> None:
        for _ in self.run_to_end():
            pass

    def step_until(self, request: Request, state: State) -> None:
        for _ in range(1000):
            if request.state is state:
                return
            self.step()
        raise AssertionError(f"never {state.name}")

    def computed_tokens(self, request: Request) -> int:
        rows = [row for plan in self.plans for row in (*plan.decodes, *plan.prefills)]
        return sum(len(row.tokens) for row in rows if row.request_id == request.id)

    def compute(self, plan: StepPlan) -> StepResult:
        rows = [*plan.decodes, *plan.prefills]
        sources = {copy.device for copy, _, _ in self.in_flight[True]}
        written = set()
        knowns = []
        for row in rows:
            known = [*row.prompt, *row.output]
            if UNKNOWN in row.tokens:
                known.append(self._sampled[row.request_id])
            knowns.append(known)
            for position, token in enumerate(row.tokens, row.start):
                token = known[position] if token == UNKNOWN else token
                place, slot = row.blocks[position // self.size], position % self.size
                assert (place, slot) not in written, "two rows write one slot"
                assert place not in sources, "a block is written while it is copied"
                written.add((place, slot))
                self.device[place][slot] = token
        tokens = []
        for row, known in zip(rows, knowns, strict=True):
            stop = row.start + len(row.tokens)
            seen = [self.device[row.blocks[p // self.size]][p % self.size] for p in range(stop)]
            assert seen == known[:stop], "a row reads somebody else's KV"
            if row.samples:
                assert row.position == stop - len(row.prompt), "a draw with the wrong key"
                tokens.append(-1 if self._spoils() else next_token(seen))
                self._sampled[row.request_id] = tokens[-1]
        return StepResult(tokens)

    def start(self, copies: list[Copy]) -> None:
        for copy in copies:
            self.copies.append(copy)
            self.in_flight[copy.out].append((copy, self.steps + self._delay(), list(self.device[copy.device])))
            if not copy.out:
                self.device[copy.device] = [-1] * self.size

    def land(self) -> None:
        for queue in self.in_flight.values():
            while queue and queue[0][1] <= self.steps:
                copy, _, at_start = queue.popleft()
                ok = not self._fails()
                if copy.out:
                    assert self.device[copy.device] == at_start, "a block was written while it was copied"
                    self.host.pop(copy.host, None)
                    if ok:
                        self.host[copy.host] = copy.tag, at_start
                elif ok:
                    tag, image = self.host[copy.host]
                    assert tag == copy.tag, "a stale image"
                    self.device[copy.device] = list(image)
                self.scheduler.land(Landed([copy], ok, 0.001), self.now)
                self.scheduler.check()
