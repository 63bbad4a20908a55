"""What passes between the scheduler and the runner: one StepPlan down, one StepResult up. Pure: no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.messages import SamplingParams, TopLogprobs

UNKNOWN = -1
"""Stands for the token of a decode row that the step before it samples: the runner takes it from there."""


@dataclass(slots=True, frozen=True)
class Row:
    """The part of one request that a step computes: its tokens `[start, start + len(tokens))`.

    A decode row is one token with `samples` set; a prefill chunk is several, and only the last chunk samples.
    `blocks` covers at least `start + len(tokens)` positions: position p lives in block `blocks[p // block_size]`,
    slot `p % block_size`. The runner writes KV for the row's tokens and reads KV of `[0, start + len(tokens))`.
    """

    request_id: int
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]  # a live view of the request's block table: read it during launch(), don't keep it
    samples: bool
    sampling: SamplingParams
    position: int  # generated tokens so far: the third part of the key of random draws
    prompt: Sequence[int] = ()  # all prompt ids, for penalties and prompt logprobs
    output: Sequence[int] = ()  # all generated ids so far, for penalties


@dataclass(slots=True, frozen=True)
class Copy:
    """One block image to move between the pools.

    `tag` names the content: a copy out stores it beside the image, a copy in is refused unless it finds it there.
    """

    device: int  # block of the device pool
    host: int  # block of the host pool
    tag: int
    out: bool  # device to host, else host to device


@dataclass(slots=True, frozen=True)
class Landed:
    """What became of copies that were started together. `seconds` is the time that they took, all of them."""

    copies: Sequence[Copy]
    ok: bool
    seconds: float


@dataclass(slots=True, frozen=True)
class StepPlan:
    """One forward pass, and the copies to start before it. Decode rows come first, then prefill chunks.

    No row reads or writes a block that a copy fills, nor writes one that a copy reads. Without rows there is nothing
    to compute.
    """

    step: int
    decodes: list[Row]
    prefills: list[Row]
    copies: list[Copy] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return len(self.decodes) + sum(len(row.tokens) for row in self.prefills)


@dataclass(slots=True)
class StepResult:
    """What a step gave, keyed like the plan's rows with `samples` set: decodes first, then prefills, in order."""

    tokens: list[int]  # one per sampling row; -1 where the row's logits were not finite
    logprobs: dict[int, TopLogprobs] = field(default_factory=dict)  # by request id, for those that asked
    prompt_logprobs: dict[int, list[TopLogprobs]] = field(default_factory=dict)
    # by request id, for prefill rows that asked: entry i is position row.start + i + 1, given the tokens up to it


def has_penalties(params: SamplingParams) -> bool:
    """Whether a token's logits depend on the tokens before it beyond the model."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
