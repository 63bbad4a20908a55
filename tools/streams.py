"""Timed streams against a running engine: what the benchmarks of swapping measure with."""

import asyncio
import random
import time
from dataclasses import dataclass, field

from frontend.engine_client import EngineClient
from protocol.errors import PagetideError
from protocol.messages import Finish, SamplingParams, TextParams, Timing, TokenPrompt, pack_i32
from protocol.status import CoreStatus


@dataclass
class Stream:
    """One request as its client saw it. Times are CLOCK_MONOTONIC seconds."""

    prompt: list[int]
    max_tokens: int
    submitted: float = 0.0
    accepted: float = 0.0
    times: list[float] = field(default_factory=list)  # of the deltas that brought tokens
    counts: list[int] = field(default_factory=list)  # of their tokens: a client that lags gets several at once
    tokens: list[int] = field(default_factory=list)
    notices: list[float] = field(default_factory=list)  # of being paused, and of running again
    text: str = ""
    finish: Finish = Finish.NONE
    error: str = ""
    timing: Timing | None = None  # the core's account of its time
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_complete(self) -> bool:
        """Whether it got all of its tokens, and its end."""
        return self.finish is Finish.LENGTH and not self.error

    @property
    def was_paused(self) -> bool:
        """Whether it was preempted, by swap or by recompute."""
        return self.timing is not None and self.timing.swaps + self.timing.recomputes > 0

    @property
    def ttft(self) -> float:
        """Seconds from submit to the first token."""
        return self.times[0] - self.submitted if self.times else float("nan")

    @property
    def gaps(self) -> list[float]:
        """Seconds between deltas."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def running_gaps(self) -> list[float]:
        """The gaps in which it was neither paused nor resumed."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [after - before for before, after in pairs if not any(before < told < after for told in self.notices)]

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.times[-1] - self.times[0]) / max(1, self.max_tokens - 1) if self.times else float("nan")


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    """Distinct prompts of ordinary tokens, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.choices(range(1000, 40000), k=length) for length in lengths]


async def run_stream(
    client: EngineClient, stream: Stream, with_ids: bool = False, priority: int = 0, with_notices: bool = False
) -> Stream:
    """Send a request and read it to its end, whatever that is. `with_ids` asks for token ids (by log-probabilities)."""
    sampling = SamplingParams(
        max_tokens=stream.max_tokens, temperature=0.0, ignore_eos=True, logprobs=0 if with_ids else -1
    )
    stream.submitted = time.monotonic()
    text = TextParams(notices=with_notices)
    generation = client.generate(TokenPrompt(pack_i32(stream.prompt)), sampling, text, priority=priority)
    try:
        async with generation:
            stream.accepted = time.monotonic()
            async for _, delta in generation:
                if delta.tokens:
                    stream.times.append(time.monotonic())
                    stream.counts.append(delta.tokens)
                    stream.has_begun.set()
                if delta.pause is not None:
                    stream.notices.append(time.monotonic())
                stream.text += delta.text
                stream.tokens += [entry.chosen.token for entry in delta.logprobs]
                stream.finish, stream.error = delta.finish, delta.error
                stream.timing = delta.timing or stream.timing
    except PagetideError as error:
        stream.error = str(error)
    return stream


async def fresh_status(client: EngineClient) -> CoreStatus:
    """A heartbeat that was sent after this call."""
    asked = time.time()
    while client.status is None or client.status.time <= asked:
        await asyncio.sleep(0.01)
    return client.status
