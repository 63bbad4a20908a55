"""Servers and links over real ipc sockets."""

import ast
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protocol import channels
from protocol.channels import Link, Peer, Server, new_identity
from protocol.errors import StartupError
from protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Hello,
    Limits,
    ModelInfo,
    Rejected,
    Role,
    Submit,
    Tokenized,
    Welcome,
    pack_i64,
)

WELCOME = Welcome(PROTOCOL_VERSION, "core-1", ModelInfo("m", "p", 10, 100, 0, [2]), Limits(10, 1000))


class Rig:
    """One server and any number of links in one thread."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint = f"ipc://{directory}/s"
        self.gone: list[Peer] = []
        self.server = Server(self.context, self.endpoint, Submit | Abort, (Role.TOKENIZER,), self.gone.append)
        self.links: list[Link] = []

    def link(self, **changes: object) -> Link:
        fields = {
            "protocol_version": PROTOCOL_VERSION,
            "role": Role.TOKENIZER,
            "identity": new_identity(Role.TOKENIZER),
        }
        hello = Hello(**(fields | {"pid": os.getpid()} | changes))
        self.links.append(Link(self.context, self.endpoint, hello, Rejected | Tokenized))
        return self.links[-1]

    def until(self, condition: object, seconds: float = 5.0) -> list[object]:
        """Let everybody receive until the condition holds; what arrived anywhere."""
        seen: list[object] = []
        deadline = time.monotonic() + seconds
        poller = zmq.Poller()
        for socket in (self.server.socket, *(s for link in self.links for s in link.sockets if not s.closed)):
            poller.register(socket, zmq.POLLIN)
        while not condition():
            assert time.monotonic() < deadline, f"nothing came but {seen}"
            poller.poll(20)
            seen += [message for _, message in self.server.receive()]
            for link in self.links:
                seen += list(link.receive())
        return seen

    def close(self) -> None:
        for link in self.links:
            if not link.sockets[0].closed:
                link.close()
        self.server.close()
        self.context.destroy(linger=0)


@pytest.fixture
def rig(short_path: Path) -> Iterator[Rig]:
    rig = Rig(short_path)
    yield rig
    rig.close()


def raw_dealer(rig: Rig, identity: bytes = b"x") -> "zmq.Socket[bytes]":
    socket = rig.context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(rig.endpoint)
    return socket


def test_welcome_then_messages_both_ways_in_order(rig: Rig) -> None:
    early = rig.link()
    assert rig.server.socket.poll(5000)
    assert not [*rig.server.receive(), *early.receive()]
    assert early.welcome is None, "nobody is welcomed before the doors open"
    rig.server.open_doors(WELCOME)
    late = rig.link()
    rig.until(lambda: early.welcome and late.welcome)
    assert early.server == "core-1"
    for number in range(200):
        early.send(Abort(pack_i64([number])))
        rig.server.send(rig.server.peers[next(iter(rig.server.peers))], Rejected(number, "queue_full", ""))
    got: list[object] = []
    while len(got) < 400:
        got += early.receive()
        got += [message for _, message in rig.server.receive()]
    assert [m.request_id for m in got if isinstance(m, Rejected)] == list(range(200))
    assert [m for m in got if isinstance(m, Abort)] == [Abort(pack_i64([n])) for n in range(200)]
    assert rig.server.sequence_gaps == early.sequence_gaps == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"protocol_version": 99}, "protocol version 99"), ({"role": Role.DETOKENIZER}, "no detokenizer is taken here")],
)
def test_refusals_name_the_reason(rig: Rig, changes: dict[str, object], reason: str) -> None:
    rig.server.open_doors(WELCOME)
    link = rig.link(**changes)
    rig.until(lambda: link.lost)
    assert reason in link.refused
    assert not rig.server.peers


def test_wait_welcome_reports_refusal_and_silence(rig: Rig, short_path: Path) -> None:
    nobody = Link(rig.context, f"ipc://{short_path}/nobody", Hello(1, Role.TOKENIZER, "t", 1), Rejected)
    with pytest.raises(StartupError, match="no answer"):
        nobody.wait_welcome(0.05)
    nobody.close()


def test_a_dead_peer_is_noticed_by_a_ping(rig: Rig) -> None:
    rig.server.open_doors(WELCOME)
    link = rig.link()
    rig.until(lambda: link.welcome)
    link.close()
    deadline = time.monotonic() + 5
    while not rig.gone:
        assert time.monotonic() < deadline
        rig.server.ping()
        rig.server.socket.poll(10)
    assert [peer.identity for peer in rig.gone] == [next(iter(rig.gone)).identity]
    assert not rig.server.peers


def test_a_link_notices_that_its_server_is_gone(rig: Rig) -> None:
    rig.server.open_doors(WELCOME)
    link = rig.link()
    rig.until(lambda: link.welcome)
    rig.server.socket.close()
    deadline = time.monotonic() + 5
    while not link.lost:
        assert time.monotonic() < deadline
        link.sockets[1].poll(50)
        list(link.receive())
    assert not link.send(Abort(b""))


def test_a_peer_that_stops_reading_loses_nothing_until_its_backlog_overflows(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.server.open_doors(WELCOME)
    link, other = rig.link(), rig.link()
    rig.until(lambda: link.welcome and other.welcome)
    by_identity = {peer.identity: peer for peer in rig.server.peers.values()}
    peer = by_identity[link._socket.getsockopt(zmq.IDENTITY).decode()]
    filler = "x" * 1000
    count = 0
    while not peer.backlog:
        rig.server.send(peer, Rejected(count, "queue_full", filler))
        count += 1
    received: list[object] = []
    while len(received) < count:
        received += [m for m in link.receive() if isinstance(m, Rejected)]
        rig.server.ping()
    assert [m.request_id for m in received] == list(range(count))
    assert link.sequence_gaps == 0

    monkeypatch.setattr(channels, "BACKLOG_BYTES", 100_000)
    while not rig.gone:
        rig.server.send(peer, Rejected(0, "queue_full", filler))
    assert rig.gone == [peer]
    assert list(rig.server.peers) == [p for p in by_identity if p != peer.identity], "the other peer is undisturbed"
    deadline = time.monotonic() + 5
    while not link.lost:  # a peer that doesn't know would wait for ever for what was aborted
        assert time.monotonic() < deadline
        rig.server.ping()
        list(link.receive())
    assert "did not read" in link.refused
    assert not rig.server._late


@pytest.mark.parametrize(
    "frames",
    [
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b""],
        [b"", b""],
        [b"\0" * 8],
        [b"\0" * 1_000_000],
        [b"\0" * 8 + b"\x93\xa6Submit"],
        [b"\0" * 8 + b"\xc1"],
        [b"a", b"b", b"c"],
    ],
)
def test_foreign_bytes_are_counted_and_dropped(rig: Rig, frames: list[bytes]) -> None:
    rig.server.open_doors(WELCOME)
    stranger = raw_dealer(rig)
    stranger.send_multipart(frames)
    rig.until(lambda: rig.server.dropped == 1)
    link = rig.link()
    rig.until(lambda: link.welcome)
    stranger.close()


def test_messages_before_hello_are_dropped(rig: Rig) -> None:
    rig.server.open_doors(WELCOME)
    stranger = raw_dealer(rig)
    stranger.send(b"\0" * 8 + channels.encode(Abort(b"")))
    rig.until(lambda: rig.server.dropped == 1)
    stranger.close()


def test_an_identity_can_not_be_borrowed(rig: Rig) -> None:
    rig.server.open_doors(WELCOME)
    stranger = raw_dealer(rig, b"mine")
    stranger.send(b"\0" * 8 + channels.encode(Hello(PROTOCOL_VERSION, Role.TOKENIZER, "yours", 1)))
    rig.until(lambda: rig.server.dropped == 1)
    assert not rig.server.peers
    stranger.close()


def test_a_second_dealer_with_a_used_identity_gets_nothing_and_disturbs_nobody(rig: Rig) -> None:
    """Failure report J3: ZeroMQ lets it connect and says nothing."""
    rig.server.open_doors(WELCOME)
    first = rig.link(identity="mine")
    rig.until(lambda: first.welcome)
    hello = Hello(PROTOCOL_VERSION, Role.TOKENIZER, "mine", os.getpid())
    second = Link(rig.context, rig.endpoint, hello, Rejected | Tokenized)
    second.send(Abort(pack_i64([2])))
    first.send(Abort(pack_i64([1])))
    assert [m for m in rig.until(lambda: rig.server.peers["mine"].received == 2) if isinstance(m, Abort)] == [
        Abort(pack_i64([1]))
    ]
    rig.server.send(rig.server.peers["mine"], Rejected(1, "queue_full", ""))
    seen: list[object] = []
    while not seen:
        first.sockets[0].poll(1000)
        seen += first.receive()
    assert seen == [Rejected(1, "queue_full", "")]
    with pytest.raises(StartupError, match="no answer"):
        second.wait_welcome(0.1)
    second.close()
    rig.server.ping()
    assert [*rig.server.receive()] == []
    assert list(rig.server.peers) == ["mine"]
    assert not rig.gone
    assert rig.server.sequence_gaps == rig.server.dropped == first.sequence_gaps == 0


def test_no_send_lends_its_buffer() -> None:
    """Failure report J1: ZeroMQ may still read what was sent without a copy when the sender changes it."""
    sends = []
    for folder in ("protocol", "engine_core", "frontend", "tools"):
        for path in (Path(__file__).parents[2] / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "send" in node.func.attr:
                    sends.append(f"{path}:{node.lineno}")
                    assert not {keyword.arg for keyword in node.keywords} & {"copy", "track", None}, sends[-1]
                    assert len(node.args) <= 2, sends[-1]
    assert len(sends) > 10


def test_identities_differ() -> None:
    assert len({new_identity(Role.CORE) for _ in range(100)}) == 100


def test_an_endpoint_that_can_not_be_bound_is_a_startup_error(rig: Rig) -> None:
    with pytest.raises(StartupError, match="can't bind"):
        Server(rig.context, "ipc:///nonexistent-directory/socket", Abort, (Role.TOKENIZER,))
