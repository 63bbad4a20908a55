"""From a checked request to its answer on the wire, whole or streamed, for as long as the client is there."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

from starlette.types import Receive, Scope, Send

from frontend.api.answer import DONE, Choice, Json, Shape, usage
from frontend.api.errors import ClientGone, describe
from frontend.engine_client import EngineClient
from frontend.generation import Generation
from frontend.metrics import Metrics
from protocol.errors import ErrorCode, PagetideError
from protocol.messages import Finish, Prompt, SamplingParams, TextDelta, TextParams

_log = logging.getLogger("pagetide.api")
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
Deltas = AsyncIterator[tuple[int, TextDelta]]  # (index of the choice among all of the request, its new text)


@dataclass(frozen=True)
class Job:
    """What to generate, and how to answer. Each prompt has `n` answers."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    text: TextParams
    n: int
    priority: int
    cache_salt: str
    shape: Shape
    is_stream: bool
    include_usage: bool
    arrival: float  # time.monotonic()


class Attended:
    """A block of code that ends when its HTTP client leaves (ClientGone), or on `interrupt` with that error.

    Like asyncio.timeout, it cancels the task inside the block and turns the cancellation into the error.
    """

    def __init__(self, receive: Receive, others: "set[Attended]") -> None:
        """`others` holds it while the block runs."""
        self._receive, self._others = receive, others
        self._error: Exception | None = None

    async def __aenter__(self) -> "Attended":
        task = asyncio.current_task()
        assert task is not None, "requests are served in tasks"
        self._task = task
        self._watch = asyncio.create_task(self._wait_for_disconnect())
        self._others.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._others.discard(self)
        self._watch.cancel()
        if self._error is not None and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self._error from None

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGone())

    def interrupt(self, error: Exception) -> None:
        """End the block with `error`."""
        if self._error is None:
            self._error = error
            self._task.cancel()


class Answer:
    """The response to a generation request; an ASGI application for one call."""

    def __init__(self, client: EngineClient, metrics: Metrics, attended: set[Attended], job: Job) -> None:
        """`attended` gets what of it can be interrupted."""
        self._client, self._metrics, self._attended, self._job = client, metrics, attended, job
        self._choices = [Choice(i) for i in range(len(job.prompts) * job.n)]
        self._first_time = 0.0
        self._generations: list[Generation] = []
        self._used: Json = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises PagetideError while nothing has been sent, and ClientGone at any time."""
        with self._metrics.open_requests.track_inprogress():
            try:
                await (self._stream if self._job.is_stream else self._gather)(receive, send)
            except ClientGone:
                self._metrics.disconnects.inc()
                raise

    async def _gather(self, receive: Receive, send: Send) -> None:
        async with self._running(receive) as deltas:
            async for index, delta in deltas:
                self._count(index, delta).gather(delta)
                _raise_error(delta)
        body = self._job.shape.whole(self._choices, self._used)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, receive: Receive, send: Send) -> None:
        shape, is_started = self._job.shape, False
        shape.begin_stream(self._choices, self._job.include_usage)
        try:
            async with self._running(receive) as deltas:
                is_started = True
                await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                async for index, delta in deltas:
                    body = shape.events(self._count(index, delta), delta)
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                    _raise_error(delta)
            end = DONE
            if self._job.include_usage:
                end = shape.usage_event(self._used) + end
        except ClientGone:
            raise
        except Exception as error:
            if not is_started:
                raise
            if not isinstance(error, PagetideError):
                _log.exception("a stream failed")
            # One error event, and no [DONE] that would pretend success.
            end = b"data: " + describe(error).body + b"\n\n"
        await send({"type": "http.response.body", "body": end})

    @asynccontextmanager
    async def _running(self, receive: Receive) -> AsyncIterator[Deltas]:
        """Run the generations; whatever ends the block ends them. Raises PagetideError, ClientGone."""
        job = self._job
        async with Attended(receive, self._attended), AsyncExitStack() as stack:
            self._generations = generations = [
                self._client.generate(
                    prompt, job.sampling, job.text, choices=job.n, priority=job.priority, cache_salt=job.cache_salt
                )
                for prompt in job.prompts
            ]
            await _enter(stack, generations)
            yield aiter(generations[0]) if len(generations) == 1 else _interleave(stack, generations, job.n)
            self._finish(sum(generation.prompt_tokens for generation in generations))

    def _count(self, index: int, delta: TextDelta) -> Choice:
        if not self._first_time and delta.pause is None:
            self._first_time = time.monotonic()
        choice = self._choices[index]
        choice.count(delta)
        if delta.finish:
            number, own_index = divmod(index, self._job.n)
            choice.times = self._generations[number].times.get(own_index)
        return choice

    def _finish(self, prompt_tokens: int) -> None:
        self._used = usage(prompt_tokens, self._choices, self._job.n)
        tokens = [choice.tokens for choice in self._choices]
        self._metrics.count_answer(self._job.arrival, self._first_time, time.monotonic(), prompt_tokens, tokens)
        times = [choice.times for choice in self._choices if choice.times is not None]
        self._metrics.count_times(times, [gap for g in self._generations for gap in g.gaps.values()])


def _raise_error(delta: TextDelta) -> None:
    if delta.finish is Finish.ERROR:
        raise PagetideError(delta.error_code or ErrorCode.INTERNAL_ERROR, delta.error)


async def _enter(stack: AsyncExitStack, generations: Sequence[Generation]) -> None:
    """Enter all at once, so that a batch waits for the core once; if one is refused, none runs."""
    if len(generations) == 1:
        await stack.enter_async_context(generations[0])
        return
    try:
        async with asyncio.TaskGroup() as group:
            for generation in generations:
                group.create_task(stack.enter_async_context(generation))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _interleave(stack: AsyncExitStack, generations: Sequence[Generation], n: int) -> Deltas:
    """Iterate over several generations as over one. What isn't taken waits in each, merged."""
    news: asyncio.Queue[tuple[int, TextDelta] | Exception | None] = asyncio.Queue(maxsize=1)

    async def pump(first: int, generation: Generation) -> None:
        try:
            async for choice, delta in generation:
                await news.put((first + choice, delta))
            await news.put(None)
        except Exception as error:
            await news.put(error)

    async def drain() -> Deltas:
        running = len(generations)
        while running:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item

    for i, generation in enumerate(generations):
        stack.callback(asyncio.create_task(pump(i * n, generation)).cancel)
    return drain()
