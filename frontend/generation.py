"""One request as its frontend holds it: accepted or refused, its deltas, its end."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import groupby
from types import TracebackType
from typing import Protocol

from frontend.timing import Times, account
from protocol.channels import Link
from protocol.errors import ErrorCode, PagetideError
from protocol.messages import (
    Accepted,
    Finish,
    Prompt,
    Rejected,
    SamplingParams,
    SubmitText,
    TextDelta,
    TextParams,
)

UNREAD_BYTES = 1 << 20  # how much text may wait for a consumer that doesn't read


class Owner(Protocol):
    """What a generation asks of its client."""

    def enter(self, generation: "Generation") -> None:
        """Take a slot, give it links and ids, and submit it. Raises PagetideError if there is no slot."""

    def leave(self, generation: "Generation") -> None:
        """Forget it, and abort what of it may still run."""


class Generation:
    """One request while it runs: `async with client.generate(...) as generation`, then iterate.

    Entering raises PagetideError if there is no slot or the request is refused. Iterating yields (choice, delta) until
    each choice has had its `finish`; deltas that wait for a slow reader are merged, one per choice. Leaving aborts what
    still runs.
    """

    def __init__(
        self,
        client: Owner,
        prompt: Prompt,
        sampling: SamplingParams,
        text: TextParams,
        choices: int,
        priority: int,
        cache_salt: str,
    ) -> None:
        self.choices = choices
        self.prompt_tokens = 0
        self.first_id = 0
        self.tokenizer: Link
        self.detokenizer: Link
        self.unfinished: set[int] = set()
        self.unread_since = float("inf")
        self.times: dict[int, Times] = {}  # by choice, when it has ended
        self.gaps: dict[int, float] = {}  # by choice: the longest time between two of its deltas, seconds
        self._submitted = 0.0
        self._last_delta: dict[int, float] = {}
        self._client = client
        self._request = prompt, sampling, text, priority, cache_salt
        self._answered = 0
        self._unread: dict[int, list[TextDelta]] = {}
        self._unread_bytes = 0
        self._error: PagetideError | None = None
        self._news = asyncio.Event()

    @property
    def ids(self) -> range:
        """Request ids of the choices."""
        return range(self.first_id, self.first_id + self.choices)

    @property
    def is_accepted(self) -> bool:
        """Whether the core has queued all choices."""
        return self._answered == self.choices

    def submit(self) -> SubmitText:
        """The message that submits it."""
        prompt, sampling, text, priority, cache_salt = self._request
        detokenizer = self.detokenizer.server
        self.unfinished = set(self.ids)
        self._submitted = time.monotonic()
        return SubmitText(self.first_id, self.choices, prompt, sampling, text, detokenizer, priority, cache_salt)

    async def __aenter__(self) -> "Generation":
        self._client.enter(self)
        try:
            while not self.is_accepted and self._error is None:
                self._news.clear()
                await self._news.wait()
            if self._error is not None:
                raise self._error
        except BaseException:
            self._client.leave(self)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.leave(self)

    async def __aiter__(self) -> AsyncIterator[tuple[int, TextDelta]]:
        while True:
            while self._unread:
                request_id = next(iter(self._unread))  # the one that waits longest, so that each choice gets its turn
                deltas = self._unread.pop(request_id)
                self._unread_bytes -= sum(map(_size, deltas))
                self.unread_since = time.monotonic() if self._unread else float("inf")
                for delta in merge_text(deltas):
                    yield request_id - self.first_id, delta
            if self._error is not None:
                raise self._error
            if not self.unfinished:
                return
            self._news.clear()
            await self._news.wait()

    def take_answer(self, message: Accepted | Rejected) -> None:
        """The core or the tokenizer has decided about one choice."""
        if isinstance(message, Rejected):
            self.unfinished.discard(message.request_id)
            self._error = PagetideError(message.code, message.message, message.param)
        else:
            self.prompt_tokens = message.prompt_tokens
            self._answered += 1
        self._news.set()

    def take_delta(self, delta: TextDelta) -> None:
        """New text of one choice."""
        if self._error is not None:
            return
        if not self._unread:
            self.unread_since = time.monotonic()
        self._unread.setdefault(delta.request_id, []).append(delta)
        self._unread_bytes += _size(delta)
        if delta.pause is None:
            self._take_time(delta)
        if delta.finish is not Finish.NONE:
            self.unfinished.discard(delta.request_id)
        self._news.set()
        if self._unread_bytes > UNREAD_BYTES:
            self.fail_slow()

    def _take_time(self, delta: TextDelta) -> None:
        now, choice = time.monotonic(), delta.request_id - self.first_id
        gap = now - self._last_delta.get(choice, now)
        self._last_delta[choice] = now
        self.gaps[choice] = gap = max(gap, self.gaps.get(choice, 0.0))
        if delta.timing is not None:
            self.times[choice] = account(delta.timing, self._submitted, now, gap)

    def fail(self, error: PagetideError) -> None:
        """End it: the consumer gets what has come, then the error."""
        if self._error is None:
            self._error = error
            self._news.set()

    def fail_slow(self) -> None:
        """End it, and let go of what waits, because nobody reads it."""
        self._unread.clear()
        self.unread_since = float("inf")
        self.fail(PagetideError(ErrorCode.CLIENT_TOO_SLOW, "the client did not read its stream"))
        self._client.leave(self)
        self.unfinished.clear()


def _size(delta: TextDelta) -> int:
    """Roughly the bytes that a delta holds on to."""
    return 64 + len(delta.text) + 256 * len(delta.logprobs)


def merge(deltas: Sequence[TextDelta]) -> TextDelta:
    """One delta that stands for several of the same request, in order."""
    first, last = deltas[0], deltas[-1]
    return TextDelta(
        request_id=first.request_id,
        text="".join(delta.text for delta in deltas),
        tokens=sum(delta.tokens for delta in deltas),
        finish=last.finish,
        stop_reason=last.stop_reason,
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
        prompt_logprobs=first.prompt_logprobs,
        cached_tokens=max(delta.cached_tokens for delta in deltas),
        error_code=last.error_code,
        error=last.error,
        timing=last.timing,
    )


def merge_text(deltas: Sequence[TextDelta]) -> Iterator[TextDelta]:
    """The fewest deltas that stand for those of one request, with its pauses where they were."""
    for is_text, group in groupby(deltas, lambda delta: delta.pause is None):
        some = list(group)
        yield from [merge(some)] if is_text and len(some) > 1 else some
