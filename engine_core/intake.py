"""The thread that takes requests in. It never waits for the step loop and holds no lock that the step loop holds.

It answers each Submit itself, Accepted or Rejected, after the same checks that frontends make. What it accepted goes
onto a deque, together with aborts and lost frontends, in the order of arrival; the step loop drains it between steps.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Container
from dataclasses import dataclass

import zmq

from engine_core.capacity import Capacity
from engine_core.request import Request
from protocol.channels import PING_INTERVAL, Peer, Server
from protocol.errors import ErrorCode, InvalidRequest, PagetideError
from protocol.limits import check_prompt_logprobs, check_sampling, check_text
from protocol.messages import Abort, Accepted, Limits, Rejected, Role, Submit, Welcome, unpack_i32, unpack_i64

_log = logging.getLogger("pagetide.intake")


@dataclass(frozen=True, slots=True)
class FrontendGone:
    """A frontend's connection broke: its requests are to be dropped."""

    identity: str


Event = Request | Abort | FrontendGone


class Intake(threading.Thread):
    """Owns the socket that tokenizers and frontends connect to."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, wake: "zmq.Socket[bytes]") -> None:
        """Bind at once; `wake` is the sending end of a pair whose other end the step loop polls."""
        super().__init__(name="intake", daemon=True)
        self.events: deque[Event] = deque()
        self.server = Server(context, endpoint, Submit | Abort, (Role.TOKENIZER, Role.FRONTEND), self._peer_gone)
        self.accepted = self.accepted_tokens = self.rejected = 0
        self.left = self.left_tokens = 0  # written by the step loop: how much of what was accepted doesn't wait
        self.detokenizers: Container[str] = ()  # identities, kept by the step loop
        self.stopping = threading.Event()
        self._wake = wake
        self._welcome: Welcome | None = None

    def open_doors(self, welcome: Welcome, capacity: Capacity) -> None:
        """Start to answer: call it once, before `start`."""
        self._welcome = welcome
        self._capacity = capacity
        self._limits: Limits = welcome.limits
        self._vocab_size = welcome.model.vocab_size

    def run(self) -> None:
        """Receive until `stopping` is set."""
        assert self._welcome is not None, "open_doors() comes first"
        self.server.open_doors(self._welcome)
        poller = zmq.Poller()
        poller.register(self.server.socket, zmq.POLLIN)
        next_ping = 0.0
        while not self.stopping.is_set():
            poller.poll(int(PING_INTERVAL * 1000))
            for peer, message in self.server.receive():
                try:
                    self._take(peer, message)
                except Exception:
                    _log.exception("intake failed on a message of %s", peer.identity)
            if time.monotonic() >= next_ping:
                self.server.ping()
                next_ping = time.monotonic() + PING_INTERVAL
        self.server.close()

    def _take(self, peer: Peer, message: Submit | Abort) -> None:
        if isinstance(message, Abort):
            self._hand_over(message)
            return
        try:
            request = self._check(message)
        except PagetideError as error:
            self.rejected += 1
            answer = Rejected(message.request_id, error.code, error.message, error.param, message.frontend)
            self.server.send(peer, answer)
        else:
            self.accepted += 1
            self.accepted_tokens += request.known
            self._hand_over(request)
            self.server.send(peer, Accepted(message.request_id, len(request.prompt), message.frontend))

    def _check(self, submit: Submit) -> Request:
        check_sampling(submit.sampling, self._vocab_size)
        check_text(submit.text)
        if not 0 <= submit.request_id < 1 << 63:
            raise InvalidRequest(f"the request id {submit.request_id} doesn't fit into 63 bits", "request_id")
        # Lengths first: a prompt that can't run costs the same however long it is.
        check_prompt_logprobs(submit.sampling, len(submit.prompt) // 4)
        limit = self._capacity.answer_limit(len(submit.prompt) // 4, submit.sampling.max_tokens)
        if len(submit.generated) // 4 >= limit:
            raise InvalidRequest("the request has generated all it may already", "generated")
        prompt, generated = self._tokens("prompt", submit.prompt), self._tokens("generated", submit.generated)
        if not prompt:
            raise InvalidRequest("the prompt is empty", "prompt")
        if submit.frontend not in self.server.peers:
            raise PagetideError(ErrorCode.ENGINE_UNAVAILABLE, "the frontend is not connected to the engine core")
        if submit.detokenizer not in self.detokenizers:
            raise PagetideError(ErrorCode.ENGINE_UNAVAILABLE, "the detokenizer is not connected to the engine core")
        if self.accepted - self.left >= self._limits.max_waiting_requests:
            raise PagetideError(ErrorCode.QUEUE_FULL, f"{self._limits.max_waiting_requests} requests are waiting")
        waiting_tokens = self.accepted_tokens - self.left_tokens
        if waiting_tokens and waiting_tokens + len(prompt) > self._limits.max_waiting_tokens:
            raise PagetideError(ErrorCode.QUEUE_FULL, f"{waiting_tokens} prompt tokens are waiting")
        return Request(
            id=submit.request_id,
            prompt=prompt,
            sampling=submit.sampling,
            max_tokens=limit,
            arrival=time.monotonic(),
            frontend=submit.frontend,
            detokenizer=submit.detokenizer,
            text=submit.text,
            priority=submit.priority,
            cache_salt=submit.cache_salt,
            output=generated,
        )

    def _tokens(self, name: str, data: bytes) -> list[int]:
        try:
            tokens = unpack_i32(data).tolist()
        except ValueError:
            raise InvalidRequest(f"the token ids of {name} are not int32", name) from None
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise InvalidRequest(f"{name} has a token id outside 0 to {self._vocab_size - 1}", name)
        return tokens

    def _peer_gone(self, peer: Peer) -> None:
        _log.debug("%s (pid %d) is gone", peer.identity, peer.hello.pid)
        if peer.hello.role is Role.FRONTEND:
            self._hand_over(FrontendGone(peer.identity))

    def _hand_over(self, event: Event) -> None:
        self.events.append(event)
        with contextlib.suppress(zmq.Again):  # a wake-up is on its way already
            self._wake.send(b"", zmq.NOBLOCK)


def aborted_ids(message: Abort) -> list[int]:
    """The ids of an Abort; an ill-formed list is nobody's."""
    try:
        return unpack_i64(message.request_ids).tolist()
    except ValueError:
        return []
