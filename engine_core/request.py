"""A request as the engine core knows it: what was asked, what has been generated, where its KV is. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from protocol.messages import SamplingParams, TextParams, TopLogprobs


class State(IntEnum):
    """Where a request is in its life.

    WAITING -> PREFILL -> DECODE -> FINISHED; a preemption leads from PREFILL or DECODE back to WAITING.
    """

    WAITING = 0
    PREFILL = 1
    DECODE = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one prompt.

    Its known tokens are prompt + output. KV of the first `computed` of them is in `blocks`; computing the last known
    one samples the next. So a request that was preempted by recompute is simply one whose `computed` is 0 again.
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
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of its first full blocks, as far as they were asked for
    indexed: int = 0  # how many of `blocks` the prefix index has been told of
    cached_tokens: int = -1  # prompt tokens found in the prefix cache at first admission; -1 before it
    prompt_logprobs: list[TopLogprobs] = field(default_factory=list)  # of the prompt's second token and on
    preemptions: int = 0
    announced: bool = False  # its detokenizer has been told
    sequence: int = 0  # order of arrival, given by the scheduler

    @property
    def known(self) -> int:
        """Number of known tokens."""
        return len(self.prompt) + len(self.output)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: who runs first, and who is preempted last."""
        return self.priority, self.sequence

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Known tokens `[start, stop)`."""
        split = len(self.prompt)
        if start >= split:
            return self.output[start - split : stop - split]
        return self.prompt[start:stop] + self.output[: max(0, stop - split)]
