"""A frontend's connection to a running engine: what API servers, the chat and other people's clients are built on.

The core's status tells which tokenizers and detokenizers there are; the client keeps a link to each. It owns its
requests: ids are its own (a random start, then a counter), and a request is in its tables exactly as long as its
Generation is entered. Everything runs in one asyncio loop.
"""

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import zmq

from frontend.generation import Generation
from protocol.channels import Link, new_identity
from protocol.codec import Decoder
from protocol.errors import ErrorCode, PagetideError, StartupError
from protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Detokenize,
    Detokenized,
    Hello,
    Limits,
    ModelInfo,
    Prompt,
    Rejected,
    Role,
    SamplingParams,
    SubmitText,
    TextDelta,
    TextDeltas,
    TextParams,
    Tokenize,
    Tokenized,
    pack_i32,
    pack_i64,
)
from protocol.runtime_dir import core_endpoint, status_endpoint
from protocol.status import CoreStatus

_log = logging.getLogger("pagetide.client")

STATUS_AGE = 3.0  # seconds without a heartbeat: the core is dead or stopped
STEP_AGE = 10.0  # seconds without the end of a step while work is pending: the step loop hangs, unless
STEP_FACTOR = 4.0  # it is no longer than this times the longest step of late, say a long prompt's on a slow CPU
UNREAD_SECONDS = 30.0  # how long text may wait for a consumer that doesn't read

Question = tuple[Link, asyncio.Future[Any]]


class EngineClient:
    """One frontend process's view of the engine. Make it with `connect`."""

    def __init__(self, directory: Path) -> None:
        self.identity = new_identity(Role.FRONTEND)
        self.lost = asyncio.Event()
        self.stray_deltas = 0
        self._aborted: deque[int] = deque(maxlen=1024)  # requests whose abort is sure to find them
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._tokenizers: dict[str, Link] = {}
        self._detokenizers: dict[str, Link] = {}
        self._handlers: dict[Link, Callable[[Any], None]] = {}  # of the links that are open
        self._dead: set[str] = set()
        self._next_id = secrets.randbits(31) << 32
        self._generations: dict[int, Generation] = {}
        self._answers: dict[int, Question] = {}
        self._status: CoreStatus | None = None
        self._status_time = time.monotonic()
        self._changed = asyncio.Event()
        self._core = self._link(core_endpoint(directory), Rejected, self._core_message)
        self._status_socket = self._context.socket(zmq.SUB)
        self._status_socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._status_socket.setsockopt(zmq.LINGER, 0)
        self._status_socket.connect(status_endpoint(directory))
        self._status_decoder = Decoder(CoreStatus, "status")
        self._loop.add_reader(self._status_socket.fileno(), self._read_status)
        self._patrol = self._loop.create_task(self._watch_consumers())

    @classmethod
    async def connect(cls, directory: Path, timeout: float = 30.0) -> "EngineClient":
        """Connect and wait until the engine can take requests. Raises StartupError after `timeout` seconds."""
        if not directory.is_dir():
            raise StartupError(f"no engine runs in {directory}")
        client = cls(directory)
        try:
            async with asyncio.timeout(timeout):
                while not client._is_ready():
                    if client.lost.is_set():
                        raise StartupError(client._core.refused or "lost the connection to the engine core")
                    client._changed.clear()
                    await client._changed.wait()
        except TimeoutError:
            await client.close()
            raise StartupError(f"the engine in {directory} did not answer within {timeout:.0f} s") from None
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        """Drop everything. Requests that still run are aborted by the core, which sees the connection go."""
        self._patrol.cancel()
        what = "this frontend is shutting down"
        self._fail(self._generations.values(), ErrorCode.SHUTTING_DOWN, what)
        self._fail_questions(self._answers.values(), ErrorCode.SHUTTING_DOWN, what)
        self._loop.remove_reader(self._status_socket.fileno())
        self._status_socket.close()
        for link in (self._core, *self._tokenizers.values(), *self._detokenizers.values()):
            self._close(link)
        self._context.term()

    # -- what is known of the engine ---------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo:
        """The model that the engine serves."""
        assert self._core.welcome is not None, "connect() waits for it"
        return self._core.welcome.model

    @property
    def limits(self) -> Limits:
        """The engine's bounds."""
        assert self._core.welcome is not None, "connect() waits for it"
        return self._core.welcome.limits

    @property
    def status(self) -> CoreStatus | None:
        """The newest heartbeat."""
        return self._status

    def health(self) -> str | None:
        """None if requests can be served, else why not."""
        if self.lost.is_set():
            return "the engine core is gone"
        if self._status is None or time.monotonic() - self._status_time > STATUS_AGE:
            return "the engine core gives no sign of life"
        if self._status.step_age > max(STEP_AGE, STEP_FACTOR * self._status.gauges.get("longest_step_seconds", 0.0)):
            return f"no step has ended for {self._status.step_age:.0f} s while requests are pending"
        if not self._is_ready():
            return "no tokenizer or no detokenizer is connected"
        return None

    def _is_ready(self) -> bool:
        links = self._tokenizers, self._detokenizers
        return self._core.welcome is not None and all(any(x.welcome for x in group.values()) for group in links)

    # -- requests ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        text: TextParams,
        *,
        choices: int = 1,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Generation:
        """A request, submitted when it is entered with `async with`."""
        return Generation(self, prompt, sampling, text, choices, priority, cache_salt)

    async def tokenize(self, prompt: Prompt) -> Tokenized:
        """Token ids of a prompt. Raises PagetideError."""
        answer = await self._ask(Tokenize(self._take_ids(1), prompt))
        assert isinstance(answer, Tokenized)
        return answer

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids. Raises PagetideError."""
        try:
            packed = pack_i32(ids)
        except OverflowError:
            raise PagetideError(ErrorCode.INVALID_VALUE, "a token id is out of range", "tokens") from None
        answer = await self._ask(Detokenize(self._take_ids(1), packed))
        assert isinstance(answer, Detokenized)
        return answer.text

    async def _ask(self, question: Tokenize | Detokenize) -> Any:
        link = self._pick(self._tokenizers)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._answers[question.request_id] = link, future
        try:
            self._send(link, question)
            answer = await future
        finally:
            del self._answers[question.request_id]
        if isinstance(answer, Rejected):
            raise PagetideError(answer.code, answer.message, answer.param)
        return answer

    def _take_ids(self, count: int) -> int:
        first = self._next_id
        self._next_id += count
        return first

    def _pick(self, links: dict[str, Link]) -> Link:
        ready = next((link for link in links.values() if link.welcome and not link.lost), None)
        if self.lost.is_set() or ready is None:
            raise PagetideError(ErrorCode.ENGINE_UNAVAILABLE, self.health() or "the engine is not available")
        links[ready.endpoint] = links.pop(ready.endpoint)  # it goes to the end of the line
        return ready

    def enter(self, generation: Generation) -> None:
        """Take a slot and submit. Raises PagetideError if the queue is full, before anything is sent."""
        unaccepted = sum(not g.is_accepted for g in self._generations.values())
        waiting = (self._status.waiting if self._status else 0) + unaccepted
        if waiting + generation.choices > self.limits.max_waiting_requests:
            raise PagetideError(ErrorCode.QUEUE_FULL, f"{waiting} requests are waiting")
        generation.tokenizer = self._pick(self._tokenizers)
        generation.detokenizer = self._pick(self._detokenizers)
        generation.first_id = self._take_ids(generation.choices)
        for request_id in generation.ids:
            self._generations[request_id] = generation
        try:
            self._send(generation.tokenizer, generation.submit())
        except BaseException:
            self.leave(generation)
            raise

    def leave(self, generation: Generation) -> None:
        """Forget a generation, and abort what of it may still run."""
        for request_id in generation.ids:
            self._generations.pop(request_id, None)
        if generation.unfinished and not self.lost.is_set():
            abort = Abort(pack_i64(sorted(generation.unfinished)))
            if self._try_send(generation.tokenizer, abort):
                self._aborted += generation.unfinished
            else:  # it may overtake the submit; then the request's first text is stray
                self._try_send(self._core, abort)

    def _send(self, link: Link, message: SubmitText | Tokenize | Detokenize) -> None:
        if not self._try_send(link, message):
            raise PagetideError(ErrorCode.QUEUE_FULL, "the tokenizer is not keeping up")

    def _try_send(self, link: Link, message: SubmitText | Tokenize | Detokenize | Abort) -> bool:
        self._loop.call_soon(self._pump, link)  # sending, even in vain, may use up the descriptor's edge
        return link.send(message)

    # -- links -------------------------------------------------------------------------------------------------

    def _link(self, endpoint: str, accepted: Any, handle: Callable[[Any], None]) -> Link:
        hello = Hello(PROTOCOL_VERSION, Role.FRONTEND, self.identity, os.getpid())
        link = Link(self._context, endpoint, hello, accepted)
        self._handlers[link] = handle
        for descriptor in link.filenos():
            self._loop.add_reader(descriptor, self._pump, link)
        self._loop.call_soon(self._pump, link)
        return link

    def _pump(self, link: Link) -> None:
        """Take all that has come on a link."""
        handle = self._handlers.get(link)
        if handle is None:
            return
        for message in link.receive():
            try:
                handle(message)
            except Exception:
                _log.exception("a message from %s failed", link.endpoint)
        if link.lost:
            self._lose(link)

    def _close(self, link: Link) -> None:
        if self._handlers.pop(link, None) is None:
            return
        for descriptor in link.filenos():
            self._loop.remove_reader(descriptor)
        link.close()

    def _lose(self, link: Link) -> None:
        self._close(link)
        self._changed.set()
        generations = set(self._generations.values())
        if link is self._core or link.refused:  # a service refuses whom it has dropped, and would do so again
            what = link.refused or "the engine core is gone"
            self.lost.set()
            self._fail(generations, ErrorCode.ENGINE_UNAVAILABLE, what)
        else:
            self._dead.add(link.endpoint)
            self._tokenizers.pop(link.endpoint, None)
            self._detokenizers.pop(link.endpoint, None)
            what = "the process that handled the text of this request is gone"
            mine = [g for g in generations if g.detokenizer is link or (g.tokenizer is link and not g.is_accepted)]
            self._fail(mine, ErrorCode.ENGINE_UNAVAILABLE, what)
        questions = [entry for entry in self._answers.values() if entry[0] is link or self.lost.is_set()]
        self._fail_questions(questions, ErrorCode.ENGINE_UNAVAILABLE, what)

    def _fail(self, generations: Iterable[Generation], code: ErrorCode, message: str) -> None:
        for generation in set(generations):
            generation.fail(PagetideError(code, message))

    def _fail_questions(self, questions: Iterable[Question], code: ErrorCode, message: str) -> None:
        for _, future in questions:
            if not future.done():
                future.set_exception(PagetideError(code, message))

    def _core_message(self, message: Any) -> None:
        self._changed.set()

    def _text_message(self, message: Any) -> None:
        """From a tokenizer."""
        if isinstance(message, Accepted | Rejected):
            generation = self._generations.get(message.request_id)
            if generation is not None:
                generation.take_answer(message)
                return
        entry = self._answers.get(getattr(message, "request_id", -1))
        if entry is not None and not entry[1].done():
            entry[1].set_result(message)
        self._changed.set()

    def _delta_message(self, message: Any) -> None:
        """From a detokenizer."""
        if isinstance(message, TextDeltas):
            for delta in message.deltas:
                generation = self._generations.get(delta.request_id)
                if generation is None:
                    self._take_stray(delta)
                else:
                    generation.take_delta(delta)
        else:
            self._changed.set()

    def _take_stray(self, delta: TextDelta) -> None:
        """Text of a request that was left: on its way when it was aborted, or the core still has to be told."""
        self.stray_deltas += 1
        request_id = delta.request_id
        if delta.finish or request_id in self._aborted:
            return
        if self._try_send(self._core, Abort(pack_i64([request_id]))):
            self._aborted.append(request_id)

    def _read_status(self) -> None:
        newest = None
        while True:
            try:
                newest = self._status_decoder.decode(self._status_socket.recv(zmq.NOBLOCK)) or newest
            except zmq.Again:
                break
        if newest is None:
            return
        self._status, self._status_time = newest, time.monotonic()
        wanted = {peer.endpoint: peer.role for peer in newest.peers if peer.endpoint}
        for endpoint, role in wanted.items():
            if endpoint in self._dead:
                continue
            if role is Role.TOKENIZER and endpoint not in self._tokenizers:
                accepted = Accepted | Rejected | Tokenized | Detokenized
                self._tokenizers[endpoint] = self._link(endpoint, accepted, self._text_message)
            elif role is Role.DETOKENIZER and endpoint not in self._detokenizers:
                self._detokenizers[endpoint] = self._link(endpoint, TextDeltas, self._delta_message)
        self._dead &= wanted.keys()
        for links in (self._tokenizers, self._detokenizers):  # whose service ended before the connection was made
            for endpoint in [e for e, link in links.items() if link.welcome is None and e not in wanted]:
                self._close(links.pop(endpoint))

    async def _watch_consumers(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            limit = time.monotonic() - UNREAD_SECONDS
            for generation in set(self._generations.values()):
                if generation.unread_since < limit:
                    generation.fail_slow()
