"""Policy of swapping: who has to leave, who comes back first, and whether swapping pays. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_core.request import Request, State

# Ranks of those who want in, within a priority.
PROMISED, OVERDUE, RESTING, NEWCOMER = range(4)


@dataclass(frozen=True, slots=True)
class SwapPolicy:
    """What preemption may do. Times in seconds."""

    preemption: str = "auto"  # swap, recompute, or auto: whichever is cheaper
    max_pause: float = 0.25  # a request silent for longer may displace others
    pause_steps: int = 4  # but not before so many of the longest steps: turns of a step would be copies only
    yielding: float = 8.0  # a request lets shorter ones pass that come within so many times what its prefill takes
    most_yielding: float = 10.0  # but no longer than that
    patience: float = 4.0  # pauses after which nobody comes in any more before one that asks for room in vain
    min_tokens: int = 16  # what a request that was preempted gets done before it is chosen again; a quarter if slow
    min_interval: float = 0.25  # between two preemptions of a request
    overcommit: float = 2.0  # newcomers displace others only while all that is there needs at most so many pools
    in_transit: float = 0.25  # share of the pool that may be moving for the sake of turns
    lookahead: int = 4  # tokens; a copy out begins before the place is needed
    swap_every: int = 0  # swap somebody out at every n-th step, whether needed or not; 0: off

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ValueError("min_tokens 0 would let requests displace each other for ever")


@dataclass(slots=True)
class Rates:
    """How fast this machine is, by measurement; 0 before the first one."""

    copy_out: float = 0.0  # blocks per second
    copy_in: float = 0.0
    prefill: float = 0.0  # tokens per second
    longest_step: float = 0.0  # seconds, of late: it halves in some 140 steps
    SMOOTHING = 0.1

    def saw_step(self, seconds: float) -> None:
        """A step took so long."""
        self.longest_step = max(seconds, self.longest_step * 0.995)

    def learn(self, name: str, amount: float, seconds: float) -> None:
        """Take in a measurement: a moving average over about ten."""
        if seconds > 0:
            old, new = getattr(self, name), amount / seconds
            setattr(self, name, old + self.SMOOTHING * (new - old) if old else new)

    def swap_is_cheaper(self, blocks_out: int, blocks_in: int, tokens: int) -> bool:
        """Whether copying blocks out and in takes less time than computing `tokens` again; yes if nobody knows."""
        if not (self.copy_out and self.copy_in and self.prefill):
            return True
        return blocks_out / self.copy_out + blocks_in / self.copy_in < tokens / self.prefill


def is_overdue(request: Request, policy: SwapPolicy, now: float, pauses: float = 1.0) -> bool:
    """Whether a paused request has been silent for too long: for more than so many pauses."""
    return now - request.last_active > pauses * policy.max_pause


def resume_key(request: Request, policy: SwapPolicy, now: float) -> tuple[int, int, float, int]:
    """Sort key of those who want in: those that room is made for, the overdue, others that have run, newcomers."""
    if request.is_promised:
        return request.priority, PROMISED, request.due, request.sequence
    if request.cached_tokens < 0:
        return request.priority, NEWCOMER, request.due, request.sequence
    if is_overdue(request, policy, now):
        return request.priority, OVERDUE, request.last_active, request.sequence
    return request.priority, RESTING, request.due, request.sequence


def is_protected(request: Request, policy: SwapPolicy, now: float) -> bool:
    """Whether a running request has not yet had its share: it came in lately, and has done too little."""
    done = request.reached - request.mark
    is_fresh = bool(request.swaps or request.recomputes) or not request.output
    has_had_time = done >= max(1, policy.min_tokens // 4) and now - request.came_in >= policy.max_pause
    return (is_fresh and done < policy.min_tokens and not has_had_time) or now - request.paused_at < policy.min_interval


def victims_for(
    candidate: Request, running: Iterable[Request], policy: SwapPolicy, now: float, is_fair: bool
) -> list[Request]:
    """Who may have to leave so that `candidate` can run, first choice first.

    Requests of a lower priority always may. Those of the same only if `is_fair`, to take turns; of them newcomers
    displace only such as have begun to answer.
    """
    is_newcomer = candidate.cached_tokens < 0
    lower = [r for r in running if r.priority > candidate.priority and _may_leave(r)]
    equal = [
        r
        for r in running
        if is_fair
        and r.priority == candidate.priority
        and _may_leave(r)
        and not is_protected(r, policy, now)
        and (r.state is State.DECODE or not is_newcomer)
    ]
    return sorted(lower, key=_last_first) + sorted(equal, key=_idle_first)


def victim_of_growth(
    growing: Request, running: Sequence[Request], policy: SwapPolicy, now: float, takes_turns: bool
) -> Request:
    """Who has to leave when a decoding request finds the pool empty; maybe itself.

    If requests take turns it is one that has had its share, else the last that came. The first that came leaves only
    when it has had its share: so somebody always gets on, and all end.
    """
    candidates = [r for r in running if r.priority >= growing.priority and _may_leave(r)]
    lowest = [r for r in candidates if r.priority == candidates[-1].priority]
    rested = [r for r in lowest if takes_turns and not is_protected(r, policy, now)]
    return min(rested, key=_idle_first) if rested else min(lowest, key=_last_first)


def _may_leave(request: Request) -> bool:
    """Whether it has blocks to give; those of one whose last token is being sampled are free in a moment anyway."""
    return request.state in (State.PREFILL, State.DECODE) and not request.is_complete


def _last_first(request: Request) -> tuple[int, int]:
    return -request.priority, -request.sequence


def _idle_first(request: Request) -> tuple[float, float, int]:
    return request.last_active, request.came_in, request.sequence
