"""A request as the engine core knows it: what was asked, what has been generated, where its KV is. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from engine_core.plan import UNKNOWN
from protocol.messages import SamplingParams, TextParams, TopLogprobs

NOWHERE = -1


class State(IntEnum):
    """Where a request is in its life.

    WAITING -> PREFILL -> DECODE -> FINISHED. Preemption leads from PREFILL or DECODE back to WAITING (by recompute), or
    over SWAPPING_OUT, SWAPPED and SWAPPING_IN back to where it was. SWAPPING_IN is also on the way of a request whose
    prompt begins with blocks from the host pool.
    """

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    SWAPPING_OUT = 3
    SWAPPED = 4
    SWAPPING_IN = 5
    FINISHED = 6


class Motion(IntEnum):
    """Whether a copy of a block is in flight."""

    STILL = 0
    LEAVING = 1  # device to host; readers don't mind
    ARRIVING = 2  # host to device: nobody reads it yet


@dataclass(slots=True, eq=False)
class Block:
    """KV of `block_size` consecutive tokens, wherever it is. Its book-keeping is the BlockPool's."""

    device: int = NOWHERE  # its place in the device pool
    host: int = NOWHERE  # its place in the host pool
    digest: bytes = b""  # the prefix index finds it by this; empty: it doesn't
    holders: int = 0  # running requests that have it in their tables
    claims: int = 0  # swapped requests that want it back
    motion: Motion = Motion.STILL
    tag: int = 0  # of its image in the host pool
    is_broken: bool = False  # a copy in has failed: what is at its place is not its KV


def surviving(table: list[Block]) -> list[Block]:
    """The first blocks of a table, up to one whose KV is in neither pool. All paused requests ask at each step."""
    for number, block in enumerate(table):
        if block.is_broken or (block.device == NOWHERE and block.host == NOWHERE):
            return table[:number]
    return table[:]


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one prompt.

    Its known tokens are prompt + output. KV of the first `computed` of them is in `table`; computing the last known one
    samples the next. So a request that was preempted by recompute is simply one whose `computed` is 0 again.
    """

    id: int
    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int  # resolved: at least 1, and prompt + max_tokens fits the context
    arrival: float  # seconds, the core's clock
    frontend: str = ""
    detokenizer: str = ""
    text: TextParams = field(default_factory=TextParams)
    priority: int = 0  # lower runs first
    cache_salt: str = ""

    output: list[int] = field(default_factory=list)
    state: State = State.WAITING
    state_before_swap: State = State.PREFILL
    computed: int = 0  # counted when it is planned
    pending: int = 0  # tokens that a step in flight will sample: known, but not by value
    table: list[Block] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # while it runs: the device places of `table`
    digests: list[bytes] = field(default_factory=list)  # of its first full blocks, as far as they were asked for
    indexed: int = 0  # how many blocks of `table` the prefix index has been told of
    cached_tokens: int = -1  # prompt tokens found in the prefix cache at first admission; -1 before it
    prompt_logprobs: list[TopLogprobs] = field(default_factory=list)  # of the prompt's second token and on
    announced: bool = False  # its detokenizer has been told
    sequence: int = 0  # order of arrival, given by the scheduler
    due: float = 0.0  # its place in order: its arrival, and the time in which it lets shorter ones pass

    swaps: int = 0  # how often it was swapped out
    recomputes: int = 0  # how often its KV was dropped
    is_promised: bool = False  # room is being made for it
    reached: int = 0  # the most tokens that it ever had computed
    mark: int = 0  # `reached` when it came in last
    last_active: float = 0.0  # when it was computed last, or came in first
    came_in: float = 0.0  # when it got its blocks last
    paused_at: float = -1e9  # when it was preempted last

    since: float = 0.0  # when it entered its state
    spent: list[float] = field(default_factory=lambda: [0.0] * State.FINISHED)  # seconds by state
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.since = self.last_active = self.arrival

    def enter(self, state: State, now: float) -> None:
        """Change the state, and account for the time in the old one."""
        self.spent[self.state] += max(0.0, now - self.since)
        self.state, self.since = state, max(now, self.since)
        if state is State.FINISHED:
            self.ended = self.since

    @property
    def known(self) -> int:
        """Number of known tokens."""
        return len(self.prompt) + len(self.output) + self.pending

    @property
    def is_decoding(self) -> bool:
        """Whether its next step computes the last known token alone."""
        return self.state is State.DECODE or (self.state is State.PREFILL and self.pending > 0)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to plan: the step in flight samples its last token."""
        return len(self.output) + self.pending >= self.max_tokens

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Known tokens `[start, stop)`; UNKNOWN is the one that is pending."""
        split = len(self.prompt)
        if stop > split + len(self.output):
            return [*self.tokens(start, stop - 1), UNKNOWN] if start < stop - 1 else [UNKNOWN]
        if start >= split:
            return self.output[start - split : stop - split]
        return self.prompt[start:stop] + self.output[: max(0, stop - split)]
