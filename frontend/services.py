"""The tokenizer and detokenizer processes: a link to the engine core, a server for frontends, a loop between them."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import zmq

from frontend.detokenizer import DetokenizerService
from frontend.text_model import TextModel
from frontend.tokenizer import TokenizerService
from frontend.vocab import dummy_text_model, load_text_model
from protocol.channels import PING_INTERVAL, Link, Peer, Server, new_identity
from protocol.errors import ErrorCode, StartupError
from protocol.lifeline import hold_lifeline
from protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Detokenize,
    Hello,
    ModelInfo,
    Paused,
    Rejected,
    Role,
    Started,
    StepOutput,
    Submit,
    SubmitText,
    TextDeltas,
    Tokenize,
    Welcome,
    pack_i64,
    unpack_i64,
)
from protocol.runtime_dir import core_endpoint, output_endpoint, service_endpoint

WELCOME_TIMEOUT = 600.0  # seconds; the core welcomes nobody before its model is loaded
TURN = 16  # messages of frontends to work on before the core's answers are looked at again

_log = logging.getLogger("pagetide.service")


class Service:
    """One process between the core and the frontends. `core` is where it works for, `server` whom it works for."""

    def __init__(self, directory: Path, role: Role, core: str, from_core: Any, from_frontends: Any) -> None:
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        hold_lifeline()
        self.stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = new_identity(role)
        endpoint = service_endpoint(directory, role.name.lower())
        self.server = Server(self._context, endpoint, from_frontends, (Role.FRONTEND,), self.frontend_gone)
        self.core = Link(self._context, core, Hello(PROTOCOL_VERSION, role, identity, os.getpid(), endpoint), from_core)
        self._identity = identity
        self._aborts: dict[bool, list[int]] = {False: [], True: []}  # what the core is still to be told, by is_finish

    def abort(self, request_ids: Iterable[int], is_finish: bool = False) -> None:
        """Let the core drop requests, as soon as it takes a message."""
        self._aborts[is_finish] += request_ids

    def frontend_gone(self, peer: Peer) -> None:
        """A frontend's connection broke."""

    def from_frontend(self, peer: Peer, message: Any) -> None:
        """Work on a frontend's message."""

    def from_core(self, message: Any) -> None:
        """Work on a message of the core."""

    def welcome(self) -> Welcome:
        """Wait until the core takes us in. Raises StartupError."""
        return self.core.wait_welcome(WELCOME_TIMEOUT, lambda: self.stopping)

    def serve(self, welcome: Welcome) -> int:
        """The loop; the process's exit code. A message that can't be handled is logged, and the next one taken."""
        self.server.open_doors(Welcome(PROTOCOL_VERSION, self._identity, welcome.model, welcome.limits))
        poller = zmq.Poller()
        for socket in (self.server.socket, *self.core.sockets):
            poller.register(socket, zmq.POLLIN)
        next_ping = 0.0
        while not (self.stopping or self.core.lost):
            poller.poll(int(PING_INTERVAL * 1000))
            for peer, message in islice(self.server.receive(), TURN):
                self._guard(lambda p=peer, m=message: self.from_frontend(p, m))  # type: ignore[misc]
            for message in self.core.receive():
                self._guard(lambda m=message: self.from_core(m))  # type: ignore[misc]
            for is_finish, ids in self._aborts.items():
                if ids and self.core.send(Abort(pack_i64(ids), is_finish)):
                    ids.clear()
            if time.monotonic() >= next_ping:
                self.server.ping()
                next_ping = time.monotonic() + PING_INTERVAL
        return 0 if self.stopping else 1

    def close(self) -> None:
        """Close all sockets."""
        self.server.close()
        self.core.close()
        self._context.term()

    @staticmethod
    def _guard(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            _log.exception("a message could not be handled")

    def _stop(self, *_: Any) -> None:
        self.stopping = True


class TokenizerProcess(Service):
    """Frontends' text to the core's token ids, and the core's answers back."""

    def __init__(self, directory: Path) -> None:
        from_frontends = SubmitText | Abort | Tokenize | Detokenize
        super().__init__(directory, Role.TOKENIZER, core_endpoint(directory), Accepted | Rejected, from_frontends)

    def run(self) -> int:
        """Load the model's tokenizer and serve."""
        welcome = self.welcome()
        self._service = TokenizerService(text_model_of(welcome.model))
        return self.serve(welcome)

    def from_frontend(self, peer: Peer, message: Any) -> None:
        """Tokenise and pass on; what is wrong goes straight back."""
        if isinstance(message, Abort):
            self.abort(unpack_i64(message.request_ids))
            return
        for answer in self._service.handle(message, peer.identity):
            if isinstance(answer, Submit) and not self.core.send(answer):
                answer = Rejected(answer.request_id, ErrorCode.QUEUE_FULL, "the engine core is not keeping up")
            if not isinstance(answer, Submit):
                self.server.send(peer, answer)

    def from_core(self, message: Any) -> None:
        """Accepted or Rejected: to the frontend that asked, if it is still there."""
        peer = self.server.peers.get(getattr(message, "frontend", ""))
        if peer is not None:
            self.server.send(peer, message)


class DetokenizerProcess(Service):
    """The core's tokens to frontends' text."""

    def __init__(self, directory: Path) -> None:
        from_core = Started | StepOutput | Abort | Paused
        super().__init__(directory, Role.DETOKENIZER, output_endpoint(directory), from_core, Hello)

    def run(self) -> int:
        """Load the model's vocabulary and serve."""
        welcome = self.welcome()
        self._service = DetokenizerService(text_model_of(welcome.model), welcome.model.eos_token_ids)
        return self.serve(welcome)

    def frontend_gone(self, peer: Peer) -> None:
        """Its requests have no reader any more."""
        self.abort(self._service.frontend_gone(peer.identity))

    def from_core(self, message: Any) -> None:
        """A step's tokens: to each frontend its text."""
        deltas_by_frontend, failed, finished = self._service.handle(message)
        self.abort(failed)
        self.abort(finished, is_finish=True)
        for frontend, deltas in deltas_by_frontend.items():
            peer = self.server.peers.get(frontend)
            if peer is None:
                self.abort(self._service.frontend_gone(frontend))
            else:
                self.server.send(peer, TextDeltas(deltas))


def text_model_of(model: ModelInfo) -> TextModel:
    """The text side of what the core has loaded. Raises StartupError."""
    return dummy_text_model(model.vocab_size) if model.is_dummy else load_text_model(model.path)


def run_tokenizer(directory: Path) -> int:
    """Be a tokenizer of the engine in `directory` until a signal or the core's end; the exit code."""
    return _run(lambda: TokenizerProcess(directory))


def run_detokenizer(directory: Path) -> int:
    """Be a detokenizer of the engine in `directory` until a signal or the core's end; the exit code."""
    return _run(lambda: DetokenizerProcess(directory))


def _run(make: "Callable[[], TokenizerProcess | DetokenizerProcess]") -> int:
    try:
        process = make()
        try:
            code = process.run()
        finally:
            process.close()
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if code:
        print(f"error: {process.core.refused or 'the engine core is gone'}", file=sys.stderr)
    return code
