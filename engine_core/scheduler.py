"""Decides what each step computes. Pure: no torch, no clock, no I/O.

    schedule() -> StepPlan      who computes which tokens, in which blocks
    commit(plan, result)        what the step gave: tokens, finished requests, full blocks for the prefix index

Each step has a decode row for every decoding request (at most `max_running`) and prefill chunks of at most
`prefill_chunk_tokens` in all, so neither side can starve the other. Requests run in order of (priority, arrival).

A request is admitted when the blocks of all its known tokens are there, and gets them at once: a prefill never stops
half-way for want of blocks, and two half-admitted prompts can't wait for each other. Only decode rows may find the pool
empty. Then the last running request in order gives all its blocks back (`_preempt`) until the row fits. The first in
order is never preempted, so it always ends and gives room to the next: no livelock.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from engine_core.block_pool import BlockPool
from engine_core.plan import Row, StepPlan, StepResult
from engine_core.prefix_index import PrefixIndex
from engine_core.request import Request, State
from protocol.errors import ErrorCode, PagetideError
from protocol.messages import Finish


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes that decide what can run."""

    num_blocks: int
    block_size: int
    max_context: int  # tokens
    max_running: int
    prefill_chunk_tokens: int
    prefix_cache: bool = True

    def answer_limit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """The one answer to "can this ever run": how many tokens a request may generate, at least 1.

        More than the context leaves is clipped. Raises PagetideError if the prompt leaves no room for a token.
        """
        context = min(self.max_context, self.num_blocks * self.block_size)
        if prompt_tokens >= context:
            raise PagetideError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {prompt_tokens} tokens; the context holds {context}, of which at least one is for the "
                "answer",
                "prompt",
            )
        room = context - prompt_tokens
        return room if max_tokens is None else min(max_tokens, room)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step meant for one request: a new token (-1 if its logits were not finite), and whether it has ended."""

    request: Request
    token: int
    finish: Finish


class Scheduler:
    """All requests of the engine and the book-keeping of their blocks."""

    def __init__(self, capacity: Capacity, eos_token_ids: Sequence[int]) -> None:
        self.capacity = capacity
        self.index = PrefixIndex()
        self.pool = BlockPool(capacity.num_blocks, self.index)
        self.requests: dict[int, Request] = {}
        self.waiting: list[Request] = []  # both lists are kept in order
        self.running: list[Request] = []
        self.waiting_tokens = 0
        self.step = 0
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self.prefix_query_tokens = 0
        self._eos = frozenset(eos_token_ids)
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Queue a request. Its id must be new and its max_tokens come from `Capacity.answer_limit`."""
        assert request.id not in self.requests, "a request id was used twice"
        self._arrivals += 1
        request.sequence = self._arrivals
        self.requests[request.id] = request
        self._enqueue(request)

    def abort(self, request_id: int) -> Request | None:
        """Drop a request in whatever state. Unknown ids, and ids aborted before, are ignored: None."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request)
        return request

    # -- planning ----------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None if nothing can run."""
        self._yield_to_priority()
        decodes = self._plan_decodes()
        prefills = self._plan_prefills()
        if not decodes and not prefills:
            return None
        self.step += 1
        return StepPlan(self.step, decodes, prefills)

    def _plan_decodes(self) -> list[Row]:
        rows = []
        for request in list(self.running):
            if request.state is State.DECODE and self._grow(request):
                rows.append(self._row(request, 1))
        return rows

    def _grow(self, request: Request) -> bool:
        """Make sure of a slot for the next token, preempting from the end of the order; False if that hit ourselves."""
        while request.state is State.DECODE and len(request.blocks) * self.capacity.block_size <= request.computed:
            if self.pool.available:
                request.blocks += self.pool.allocate(1)
            else:
                self._preempt(self.running[-1])
        return request.state is State.DECODE

    def _plan_prefills(self) -> list[Row]:
        rows = []
        budget = self.capacity.prefill_chunk_tokens
        for request in self.running:
            if request.state is State.PREFILL and budget:
                rows.append(self._row(request, min(budget, request.known - request.computed)))
                budget -= len(rows[-1].tokens)
        while budget and self.waiting and len(self.running) < self.capacity.max_running:
            request = self.waiting[0]
            if not self._admit(request):
                break
            rows.append(self._row(request, min(budget, request.known - request.computed)))
            budget -= len(rows[-1].tokens)
        return rows

    def _yield_to_priority(self) -> None:
        """Preempt requests of a lower priority while that gets the first waiting request a place."""
        while self.waiting and self.running and self.running[-1].priority > self.waiting[0].priority:
            request = self.waiting[0]
            missing = self._missing_blocks(request)[1]
            if not missing and len(self.running) < self.capacity.max_running:
                return
            lower = [other for other in self.running if other.priority > request.priority]
            if missing > sum(len(other.blocks) + 1 for other in lower):
                return
            self._preempt(lower[-1])

    def _missing_blocks(self, request: Request) -> tuple[list[int], int]:
        """The cached blocks a waiting request would share, and how many blocks the pool lacks for it.

        One block is kept in hand for each running request, so that an admission isn't followed by a preemption at once.
        """
        hits = self._cached_prefix(request)
        needed = self._block_count(request.known) - len(hits)
        evictable_hits = sum(not self.pool.is_referenced(block) for block in hits)
        return hits, max(0, needed + evictable_hits + len(self.running) - self.pool.available)

    def _admit(self, request: Request) -> bool:
        """Give the first waiting request its blocks, if they are there."""
        hits, missing = self._missing_blocks(request)
        if missing:
            return False
        self.pool.share(hits)
        request.blocks = hits + self.pool.allocate(self._block_count(request.known) - len(hits))
        request.computed = len(hits) * self.capacity.block_size
        request.indexed = len(hits)
        if request.cached_tokens < 0:
            request.cached_tokens = request.computed
            self.prefix_hit_tokens += request.computed
            self.prefix_query_tokens += request.known
        request.state = State.PREFILL
        del self.waiting[0]
        self.waiting_tokens -= request.known
        insort(self.running, request, key=_order)
        return True

    def _cached_prefix(self, request: Request) -> list[int]:
        """The blocks that hold the longest cached prefix, always short of the last known token."""
        if not self.capacity.prefix_cache or request.sampling.prompt_logprobs >= 0:
            return []
        blocks: list[int] = []
        for position in range((request.known - 1) // self.capacity.block_size):
            block = self.index.find(self._digest(request, position))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _digest(self, request: Request, position: int) -> bytes:
        """The digest of a request's full block at `position`; those before it have been asked for already."""
        if position == len(request.digests):
            size = self.capacity.block_size
            parent = request.digests[-1] if position else self.index.root(request.cache_salt)
            tokens = request.tokens(position * size, (position + 1) * size)
            request.digests.append(self.index.digest(parent, tokens))
        return request.digests[position]

    def _block_count(self, tokens: int) -> int:
        return -(-tokens // self.capacity.block_size)

    def _row(self, request: Request, count: int) -> Row:
        stop = request.computed + count
        return Row(
            request_id=request.id,
            tokens=request.tokens(request.computed, stop),
            start=request.computed,
            blocks=request.blocks,
            samples=stop == request.known,
            sampling=request.sampling,
            position=len(request.output),
            prompt=request.prompt,
            output=request.output,
        )

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks away. By recompute: its tokens are kept, its KV is dropped.

        Full blocks stay findable until they are evicted, so what survives is not computed again.
        """
        self.preemptions += 1
        request.preemptions += 1
        self.running.remove(request)
        self._release_blocks(request)
        request.state = State.WAITING
        self._enqueue(request)

    # -- results -----------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[Outcome]:
        """Take in what a step gave. Requests that were aborted meanwhile are passed over."""
        outcomes = []
        sampled = iter(result.tokens)
        for row in (*plan.decodes, *plan.prefills):
            token = next(sampled) if row.samples else None
            request = self.requests.get(row.request_id)
            if request is None:
                continue
            if request.sampling.prompt_logprobs >= 0:
                self._take_prompt_logprobs(request, row, result)
            request.computed += len(row.tokens)
            self._index_full_blocks(request)
            if token is not None:
                outcomes.append(self._take_token(request, token))
        return outcomes

    def _take_token(self, request: Request, token: int) -> Outcome:
        if token < 0:
            for block in request.blocks:  # what is wrong may be in any of them, and must not be found again
                self.index.forget(block)
            self._finish(request)
            return Outcome(request, token, Finish.ERROR)
        request.state = State.DECODE
        request.output.append(token)
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

    def _index_full_blocks(self, request: Request) -> None:
        if not self.capacity.prefix_cache:
            return
        while (request.indexed + 1) * self.capacity.block_size <= request.computed:
            self.index.insert(self._digest(request, request.indexed), request.blocks[request.indexed])
            request.indexed += 1

    def _finish(self, request: Request) -> None:
        del self.requests[request.id]
        if request.state is State.WAITING:
            self.waiting.remove(request)
            self.waiting_tokens -= request.known
        else:
            self.running.remove(request)
            self._release_blocks(request)
        request.state = State.FINISHED

    def _release_blocks(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed = request.indexed = 0

    def _enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=_order)
        self.waiting_tokens += request.known

    def check(self) -> None:
        """Prove the invariants between requests, queues and blocks. For tests and debugging."""
        self.pool.check(request.blocks for request in self.requests.values())
        assert sorted(self.requests) == sorted(request.id for request in self.waiting + self.running)
        assert self.waiting_tokens == sum(request.known for request in self.waiting)
        assert self.waiting == sorted(self.waiting, key=_order)
        assert self.running == sorted(self.running, key=_order)
        assert len(self.running) <= self.capacity.max_running
        for request in self.waiting:
            assert request.state is State.WAITING
            assert not request.blocks
            assert request.computed == 0
        for request in self.running:
            assert request.state in (State.PREFILL, State.DECODE)
            assert request.computed <= len(request.blocks) * self.capacity.block_size


def _order(request: Request) -> tuple[int, int]:
    return request.order
