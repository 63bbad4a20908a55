"""The loop between core and frontends, with played connections; system tests run the real processes."""

import itertools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.services import DetokenizerProcess, Service, TokenizerProcess
from protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Limits,
    Message,
    ModelInfo,
    Welcome,
    pack_i64,
    unpack_i64,
)

WELCOME = Welcome(PROTOCOL_VERSION, "core", ModelInfo("m", "p", 10, 100, 0, [2]), Limits(4, 1000))
PEER = SimpleNamespace(identity="front")


class PlayedConnection:
    """Both a Server and a Link. `inbox` is what comes, one list per look; what is sent is in `sent` unless `full`."""

    def __init__(self, descriptor: int) -> None:
        self.socket, self.sockets = descriptor, [descriptor]
        self.inbox: list[Any] = []
        self.sent: list[Message] = []
        self.full = self.lost = False
        self.peers: dict[str, Any] = {}
        self.looks = 0

    def open_doors(self, welcome: Welcome) -> None: ...

    def ping(self) -> None: ...

    def receive(self) -> Iterator[Any]:
        self.looks += 1
        yield from self.inbox.pop(0) if self.inbox else ()

    def send(self, message: Message) -> bool:
        if not self.full:
            self.sent.append(message)
        return not self.full


@pytest.fixture
def readable() -> Iterator[int]:
    """A descriptor that polls as readable at once."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"x")
    yield read_end
    os.close(read_end)
    os.close(write_end)


def played(kind: type[Service], readable: int) -> Any:
    process = kind.__new__(kind)
    process.stopping, process._identity, process._aborts = False, "me", {False: [], True: []}
    process.core, process.server = PlayedConnection(readable), PlayedConnection(readable)
    return process


@pytest.mark.parametrize("kind", [TokenizerProcess, DetokenizerProcess])
def test_aborts_wait_for_a_core_that_takes_no_more(readable: int, kind: type[Service]) -> None:
    process = played(kind, readable)
    process.core.full = True
    if kind is TokenizerProcess:
        process.server.inbox = [[(PEER, Abort(pack_i64([1]))), (PEER, Abort(b"abc")), (PEER, Abort(pack_i64([2])))]]
    else:
        process._service = SimpleNamespace(frontend_gone=lambda identity: [1, 2])
        process.frontend_gone(PEER)

    def stop_later() -> Iterator[Any]:
        process.core.looks += 1
        process.core.full = process.core.looks < 3
        process.stopping = process.core.looks == 4
        yield from ()

    process.core.receive = stop_later
    assert process.serve(WELCOME) == 0
    (abort,) = process.core.sent
    assert unpack_i64(abort.request_ids).tolist() == [1, 2]


def test_frontends_that_never_pause_leave_the_core_its_turn(readable: int) -> None:
    process = played(TokenizerProcess, readable)
    process.server.inbox = [((PEER, n) for n in itertools.count())]
    process.from_frontend = lambda peer, message: None

    def stop() -> Iterator[Any]:
        process.stopping = True
        yield from ()

    process.core.receive = stop
    assert process.serve(WELCOME) == 0


def test_finished_and_failed_requests_are_told_apart(readable: int) -> None:
    process = played(DetokenizerProcess, readable)
    process._service = SimpleNamespace(handle=lambda message: ({}, [1], [2, 3]))
    process.core.inbox = [["a step"]]
    real = process.core.receive

    def receive_and_stop() -> Iterator[Any]:
        yield from real()
        process.stopping = True

    process.core.receive = receive_and_stop
    assert process.serve(WELCOME) == 0
    assert process.core.sent == [Abort(pack_i64([1])), Abort(pack_i64([2, 3]), is_finish=True)]
