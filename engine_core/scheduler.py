"""Decides what each step computes, who runs and whose KV moves. Pure: no torch, no clock, no I/O.

    schedule(now) -> StepPlan   who computes which tokens, in which blocks; which blocks are to be copied
    commit(plan, result, ...)   what the step gave: tokens, finished requests, full blocks for the prefix index
    land(landed, now)           which copies have ended

Each step has a decode row for every decoding request (at most `max_running`) and prefill chunks of at most
`prefill_chunk_tokens` in all, so neither side can starve the other.

A request comes in when there is a place for the blocks of all its known tokens, and gets them at once: a prefill never
stops half-way for want of blocks, and two half-admitted prompts can't wait for each other. First come those that were
preempted (`paused`), then newcomers (`waiting`), each by priority and age; a long prompt lets shorter ones pass that
come soon after it. Only decode rows may find the pool empty.

Preemption (residency.py) frees places when copies have landed. Nobody waits for that: a row without a place is left
out of the step. With swapping, requests also take turns (swap.py): newcomers and those that have been silent for too
long displace the ones that have been idle or in for longest.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine_core.capacity import Capacity
from engine_core.plan import Landed, Row, StepPlan, StepResult
from engine_core.request import Block, Request, State
from engine_core.residency import Residency, in_order
from engine_core.swap import NEWCOMER, RESTING, SwapPolicy, is_overdue, resume_key, victim_of_growth, victims_for
from protocol.messages import Finish


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step meant for one request: a new token (-1 if its logits were not finite), and whether it has ended."""

    request: Request
    token: int
    finish: Finish


class Scheduler:
    """All requests of the engine: who waits, and what those that are in compute next."""

    def __init__(
        self,
        capacity: Capacity,
        eos_token_ids: Sequence[int],
        policy: SwapPolicy | None = None,
        residency: type[Residency] = Residency,
    ) -> None:
        self.capacity = capacity
        self.policy = self._asked = policy or SwapPolicy()
        self.residency = residency(capacity.num_blocks, capacity.block_size, capacity.prefix_cache, self.policy)
        self.pool, self.index = self.residency.pool, self.residency.index
        self.running, self.paused = self.residency.running, self.residency.paused
        self.counts, self.rates, self.pauses = self.residency.counts, self.residency.rates, self.residency.pauses
        self.requests: dict[int, Request] = {}
        self.waiting: list[Request] = []  # newcomers, in order
        self.waiting_tokens = 0
        self.step = 0
        self.prefix_hit_tokens = self.prefix_query_tokens = 0
        self._eos = frozenset(eos_token_ids)
        self._arrivals = self._last_forced = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.requests)

    @property
    def now(self) -> float:
        """The caller's clock at the last call that told it."""
        return self.residency.now

    def add(self, request: Request) -> None:
        """Queue a request. Its id must be new and its max_tokens come from `Capacity.answer_limit`."""
        assert request.id not in self.requests, "a request id was used twice"
        self._arrivals += 1
        request.sequence = self._arrivals
        request.due = request.arrival + self._yielding(request)
        self.requests[request.id] = request
        insort(self.waiting, request, key=in_order)
        self.waiting_tokens += request.known

    def _yielding(self, request: Request) -> float:
        """How long it lets shorter ones pass: by what it has to compute, as far as that is known by now."""
        if not self.rates.prefill:
            return 0.0
        found = len(self.index.prefix_of(request)) * self.capacity.block_size
        seconds = (request.known - found) / self.rates.prefill
        return min(self.policy.yielding * seconds, self.policy.most_yielding)

    def abort(self, request_id: int) -> Request | None:
        """Drop a request in whatever state. Unknown ids, and ids aborted before, are ignored: None."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request)
        return request

    def grow_host(self, host_blocks: int) -> None:
        """The host pool has become so large."""
        self.pool.grow_host(host_blocks)

    def discard(self, request_id: int) -> Request | None:
        """Drop a request whose KV may be wrong: nobody is to find it again."""
        request = self.requests.get(request_id)
        if request is not None:
            self._discard(request)
        return request

    # -- planning ----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or None if there is nothing to compute or to copy."""
        self.residency.now = now
        self.policy = self._patient_policy()
        if self.policy.swap_every and self.residency.swaps:
            self._swap_needlessly()
        self._let_in()
        if self.residency.swaps:
            self._swap_ahead()
        decodes = self._plan_decodes()
        prefills = self._plan_prefills()
        copies, self.pool.copies = self.pool.copies, []
        if not decodes and not prefills:
            return StepPlan(self.step, [], [], copies) if copies else None
        self.step += 1
        for row in (*decodes, *prefills):
            request = self.requests[row.request_id]
            request.computed += len(row.tokens)
            request.pending += row.samples
        return StepPlan(self.step, decodes, prefills, copies)

    def _patient_policy(self) -> SwapPolicy:
        """The policy as asked for, with a pause that suits the length of a step."""
        steps = self._asked.pause_steps * self.rates.longest_step
        return self._asked if steps <= self._asked.max_pause else replace(self._asked, max_pause=steps)

    def _let_in(self) -> None:
        """Bring in who has a place, in order; begin to make room for those who may ask for it."""
        promised = 0  # places that those before in order are waiting for
        refused: int | None = None  # the priority of one that asked for room in vain: nobody makes room behind its back
        paused = [request for request in self.paused if request.state is not State.SWAPPING_OUT]
        newcomers = self.waiting[: self.capacity.max_running]
        turns = sorted((resume_key(request, self.policy, self.now), request) for request in (*paused, *newcomers))
        for (priority, rank, *_), request in turns:
            is_behind = priority == refused and rank < NEWCOMER
            if (is_behind or rank == RESTING) and self.running and not self._has_place(promised + 1):
                continue
            if request.state is State.WAITING and self._is_busy(request):
                if rank == NEWCOMER:
                    return
                continue
            found, needed = self._needs(request, promised)
            if not self._has_place(needed) and not is_behind:
                self._make_room(request, needed, found)
                found, needed = self._needs(request, promised)  # what was found may have been given up
            if self._has_place(needed):
                is_new = request.cached_tokens < 0
                self.residency.bring_in(request, found)
                if is_new:
                    self._count_newcomer(request)
            elif not self.residency.swaps or rank == NEWCOMER:
                return
            elif request.is_promised:
                promised = needed
            elif is_overdue(request, self.policy, self.now, self.policy.patience):
                return
            else:
                refused = priority

    def _needs(self, request: Request, promised: int) -> tuple[list[Block], int]:
        """The blocks of a request that needn't be computed, and how many places it needs beside `promised` ones."""
        found = self.residency.surviving_blocks(request)
        blocks = self.residency.block_count(request.known) - len(found)
        return found, blocks + self.pool.places_for(found) + promised

    def _is_busy(self, request: Request) -> bool:
        """Whether those that are in fill this step's prefill budget and the next: `request` would only hold blocks.

        The next, too, so that blocks of a known prefix have time to arrive from the host pool.
        """
        ahead = [r for r in self.running if r.state is not State.DECODE and in_order(r) < in_order(request)]
        return sum(other.known - other.computed for other in ahead) >= 2 * self.capacity.prefill_chunk_tokens

    def _has_place(self, needed: int) -> bool:
        """Whether one more may run, with `needed` places.

        One is kept in hand for each running request, so that an admission isn't followed by a preemption at once.
        """
        return len(self.running) < self.capacity.max_running and needed + len(self.running) <= self.pool.available

    def _make_room(self, request: Request, needed: int, found: list[Block]) -> None:
        """Save cached blocks and preempt others for a request, if that gets it the place it needs."""
        missing = needed + len(self.running) - self.pool.available - self.pool.coming
        missing -= self.pool.save_cached(missing, found)
        seats = len(self.running) - self.capacity.max_running + 1
        victims: list[Request] = []
        host_places = 0
        for victim in victims_for(request, self.running, self.policy, self.now, self._may_take_turn(request)):
            if missing <= 0 and len(victims) >= seats:
                break
            if victim.priority == request.priority and not self.residency.can_swap(victim, host_places):
                continue  # taking turns isn't worth computing again
            victims.append(victim)
            host_places += self.residency.host_cost(victim)
            missing -= 1 + sum(block.holders == 1 for block in victim.table)
        if missing > 0 or len(victims) < seats:
            return
        request.is_promised = True
        for victim in victims:
            self.residency.preempt(victim)
        self.pool.save_cached(needed + len(self.running) - self.pool.available - self.pool.coming, found)

    def _may_take_turn(self, request: Request) -> bool:
        """Whether a request may displace others of its own priority."""
        most_moving = max(1, self.policy.in_transit * self.capacity.num_blocks)
        if not self.residency.swaps or self.pool.moving >= most_moving:
            return False
        if request.cached_tokens >= 0:
            return request.is_promised or is_overdue(request, self.policy, self.now)
        wanted = self.residency.block_count(self.waiting_tokens) + sum(len(other.table) for other in self.running)
        wanted += sum(self.residency.block_count(other.known) for other in self.paused)
        if wanted > self.policy.overcommit * self.capacity.num_blocks:
            return False
        is_full = len(self.running) >= self.capacity.max_running
        overdue = (other for other in self.paused if is_overdue(other, self.policy, self.now))
        return not is_full and all(other.priority > request.priority for other in overdue)

    def _count_newcomer(self, request: Request) -> None:
        request.cached_tokens = request.computed
        self.prefix_hit_tokens += request.computed
        self.prefix_query_tokens += request.known
        self.waiting.remove(request)
        self.waiting_tokens -= request.known

    def _swap_ahead(self) -> None:
        """Begin copies out before the pool is empty: they take some steps, and rows shouldn't have to wait for them."""
        size, ahead = self.capacity.block_size, self.policy.lookahead
        decoding = [request for request in self.running if request.is_decoding and not request.is_complete]
        needed = sum(len(request.table) * size < request.computed + ahead for request in decoding)
        missing = needed - self.pool.available - self.pool.coming
        if self.pool.moving < self.policy.in_transit * self.capacity.num_blocks:
            missing -= self.pool.save_cached(missing + self.capacity.num_blocks // 16)
        if missing > 0 and len(decoding) > 1:
            victim = victim_of_growth(decoding[0], self.running, self.policy, self.now, True)
            if self.residency.can_swap(victim):
                self.residency.preempt(victim)

    def _swap_needlessly(self) -> None:
        """At every n-th step, swap out the decoding request that has been in for longest and has got something done."""
        decoding = [r for r in self.running if r.is_decoding and r.reached > r.mark]
        if decoding and self.step >= self._last_forced + self.policy.swap_every:
            self._last_forced = self.step
            self.residency.swap_out(min(decoding, key=lambda request: request.paused_at))

    def _plan_decodes(self) -> list[Row]:
        unfinished = [request for request in self.running if not request.is_complete]
        grown = [request for request in unfinished if request.is_decoding and self._grow(request)]
        return [self._row(request, 1) for request in grown if request.is_decoding]  # a later one may have displaced it

    def _grow(self, request: Request) -> bool:
        """Make sure of a place for the next token, preempting others; False if it has to wait, or was hit itself."""
        while request.is_decoding and len(request.table) * self.capacity.block_size <= request.computed:
            if not self.pool.available and not self.pool.coming:
                self.pool.save_cached(1)
            if self.pool.available:
                request.table += self.pool.allocate(1)
                request.blocks.append(request.table[-1].device)
            elif self.pool.coming or any(other.is_complete for other in self.running):
                return False
            else:
                victim = victim_of_growth(request, self.running, self.policy, self.now, True)
                if not self.residency.can_swap(victim):
                    victim = victim_of_growth(request, self.running, self.policy, self.now, False)
                self.residency.preempt(victim)
        return request.is_decoding

    def _plan_prefills(self) -> list[Row]:
        rows = []
        budget = self.capacity.prefill_chunk_tokens
        for request in self.running:
            if request.state is State.PREFILL and not request.pending and budget:
                rows.append(self._row(request, min(budget, request.known - request.computed)))
                budget -= len(rows[-1].tokens)
        return rows

    def _row(self, request: Request, count: int) -> Row:
        stop = request.computed + count
        return Row(
            request_id=request.id,
            tokens=request.tokens(request.computed, stop),
            start=request.computed,
            blocks=request.blocks,
            samples=stop == request.known,
            sampling=request.sampling,
            position=len(request.output) + request.pending,
            prompt=request.prompt,
            output=request.output,
        )

    def land(self, landed: Landed, now: float) -> None:
        """Take in that copies have ended, well or not."""
        self.residency.now = now
        self.residency.land(landed)

    # -- results -----------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float, seconds: float = 0.0) -> list[Outcome]:
        """Take in what a step gave in `seconds`. Requests that were aborted meanwhile are passed over."""
        self.residency.now = now
        self.rates.saw_step(seconds)
        is_full = 2 * plan.num_tokens >= self.capacity.prefill_chunk_tokens
        if plan.prefills and (is_full or plan.num_tokens > self.rates.prefill * seconds):  # a short one is a bound
            self.rates.learn("prefill", plan.num_tokens, seconds)
        outcomes = []
        sampled = iter(result.tokens)
        for row in (*plan.decodes, *plan.prefills):
            token = next(sampled) if row.samples else None
            request = self.requests.get(row.request_id)
            if request is None:
                continue
            if request.sampling.prompt_logprobs >= 0:
                self._take_prompt_logprobs(request, row, result)
            done = row.start + len(row.tokens)
            request.reached, request.last_active = max(request.reached, done), now
            if token is not None:
                outcomes.append(self._take_token(request, token, done))
            else:
                self.index.insert_full(request, done)
        return outcomes

    def _take_token(self, request: Request, token: int, done: int) -> Outcome:
        request.pending -= 1
        if token < 0:
            self._discard(request)
            return Outcome(request, token, Finish.ERROR)
        if request.state is State.PREFILL:
            request.enter(State.DECODE, self.now)
        request.output.append(token)
        self.index.insert_full(request, done)
        finish = Finish.NONE
        if (token in self._eos and not request.sampling.ignore_eos) or token in request.sampling.stop_token_ids:
            finish = Finish.STOP
        elif len(request.output) >= request.max_tokens:
            finish = Finish.LENGTH
        if finish:
            self._finish(request)
        return Outcome(request, token, finish)

    def _take_prompt_logprobs(self, request: Request, row: Row, result: StepResult) -> None:
        """Append a chunk's; a prefill that starts again after a preemption fills the same places again."""
        entries = result.prompt_logprobs.get(request.id, [])
        del request.prompt_logprobs[row.start :]
        request.prompt_logprobs += entries[: max(0, len(request.prompt) - 1 - row.start)]

    def _discard(self, request: Request) -> None:
        for block in request.table:
            self.index.forget(block)
        self._finish(request)

    def _finish(self, request: Request) -> None:
        del self.requests[request.id]
        if request.cached_tokens < 0:
            self.waiting.remove(request)
            self.waiting_tokens -= request.known
        else:
            self.residency.leave(request)
        request.enter(State.FINISHED, self.now)

    def check(self) -> None:
        """Prove the invariants between requests, queues and blocks. For tests and debugging."""
        self.residency.check()
        assert sorted(self.requests) == sorted(r.id for r in self.waiting + self.paused + self.running)
        assert self.waiting_tokens == sum(request.known for request in self.waiting)
        assert self.waiting == sorted(self.waiting, key=in_order)
        assert len(self.running) <= self.capacity.max_running
        assert all(r.state is State.WAITING and r.cached_tokens < 0 and not r.table for r in self.waiting)
