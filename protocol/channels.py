"""The two kinds of connection: a Server takes many peers on one ROUTER, a Link is one peer's DEALER to a server.

Every frame is an 8-byte little-endian sequence number, counted per direction of a connection, then one encoded message.
Sends never block. What ZeroMQ can't take at once waits in a bounded backlog per peer; a peer that lets it overflow is
declared gone, and Refused as soon as it reads again. A peer whose connection broke is noticed at the next send, at the
latest at the next Ping. Identities and endpoints of services are never used twice, so a connection that has been lost
stays lost: nobody reconnects.

Sockets belong to one thread. `Link.filenos()` is for an event loop's reader: after each wake-up and after each send,
call `receive()` until it is empty (the descriptors are edge-triggered).
"""

import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.codec import Decoder, encode
from protocol.errors import StartupError
from protocol.messages import PROTOCOL_VERSION, Hello, Message, Ping, Refused, Role, Welcome

HIGH_WATER_MARK = 1000  # messages in ZeroMQ's own queue per peer
BACKLOG_BYTES = 64 << 20  # beyond that, per peer
MAX_MESSAGE_BYTES = 64 << 20
PING_INTERVAL = 0.5  # seconds
_HEADER = 8


def new_identity(role: Role) -> str:
    """A name for this process and start that no other will have."""
    return f"{role.name.lower()}-{os.getpid()}-{secrets.token_hex(4)}"


def _frame(sequence: int, message: Message) -> bytes:
    return sequence.to_bytes(_HEADER, "little") + encode(message)


def _configure(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


def remove_socket_file(endpoint: str) -> None:
    """Remove the file of an ipc endpoint that was bound; ZeroMQ leaves it behind."""
    with contextlib.suppress(OSError):
        os.unlink(endpoint.removeprefix("ipc://"))


class Peer:
    """A process that said Hello to a Server and was taken in."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self.address = hello.identity.encode()
        self.sent = 0
        self.received = 0
        self.backlog: deque[bytes] = deque()
        self.backlog_bytes = 0

    @property
    def identity(self) -> str:
        """The peer's own name."""
        return self.hello.identity


class Server:
    """A ROUTER that takes peers of the given roles in and exchanges messages with them."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        accepted: Any,
        roles: tuple[Role, ...],
        on_gone: Callable[[Peer], None] = lambda peer: None,
    ) -> None:
        """Bind. `accepted` is the union of message types that peers may send; `on_gone` hears of each lost peer once.

        Nobody is welcomed before `open_doors`. Raises StartupError if the endpoint can't be bound.
        """
        self._socket = context.socket(zmq.ROUTER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise StartupError(f"can't bind {endpoint}: {error.strerror}") from error
        self._endpoint = endpoint
        self._decoder = Decoder(accepted | Hello, endpoint.rsplit("/", 1)[-1])
        self._roles = roles
        self._on_gone = on_gone
        self._welcome: Welcome | None = None
        self.peers: dict[str, Peer] = {}
        self._late: list[Peer] = []  # dropped for their backlog, and not yet told so
        self.sequence_gaps = 0

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """For a poller."""
        return self._socket

    @property
    def dropped(self) -> int:
        """Messages that were not ours to take."""
        return self._decoder.dropped

    def open_doors(self, welcome: Welcome) -> None:
        """From now on take in everybody; those who have said Hello already wait in ZeroMQ's queue."""
        self._welcome = welcome

    def receive(self) -> Iterator[tuple[Peer, Any]]:
        """Yield (peer, message) until nothing is left. Handshakes are dealt with here."""
        while self._welcome is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2 or len(frames[1]) <= _HEADER:
                self._decoder.drop(f"{len(frames)} frames")
                continue
            address, frame = frames
            message = self._decoder.decode(memoryview(frame)[_HEADER:])
            if isinstance(message, Hello):
                self._greet(address, message, self._welcome)
            elif message is not None:
                peer = self.peers.get(address.decode(errors="replace"))
                if peer is None:
                    self._decoder.drop("a message before Hello")
                    continue
                if int.from_bytes(frame[:_HEADER], "little") != peer.received:
                    self.sequence_gaps += 1
                peer.received = int.from_bytes(frame[:_HEADER], "little") + 1
                yield peer, message

    def _greet(self, address: bytes, hello: Hello, welcome: Welcome) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            reason = f"protocol version {hello.protocol_version} met version {PROTOCOL_VERSION}; use one installation"
        elif hello.role not in self._roles:
            reason = f"no {hello.role.name.lower()} is taken here"
        elif hello.identity.encode() != address or hello.identity in self.peers:
            reason = f"the identity {hello.identity} is not its sender's own"
        else:
            peer = self.peers[hello.identity] = Peer(hello)
            peer.received = 1
            self.send(peer, welcome)
            return
        self._decoder.drop(reason)
        self._try_send(address, _frame(0, Refused(reason)))

    def send(self, peer: Peer, message: Message) -> None:
        """Send, or keep for later, in order. A peer that is gone or lets its backlog overflow is dropped."""
        if peer.identity not in self.peers:
            return
        frame = _frame(peer.sent, message)
        peer.sent += 1
        peer.backlog.append(frame)
        peer.backlog_bytes += len(frame)
        self._drain(peer)

    def _drain(self, peer: Peer) -> None:
        while peer.backlog:
            outcome = self._try_send(peer.address, peer.backlog[0])
            if outcome is None:
                self.drop(peer)
                return
            if not outcome:
                break
            peer.backlog_bytes -= len(peer.backlog.popleft())
        if peer.backlog_bytes > BACKLOG_BYTES:
            self._late.append(peer)
            self.drop(peer)

    def _try_send(self, address: bytes, frame: bytes) -> bool | None:
        """True: sent; False: can't be taken now; None: there is no such peer any more."""
        try:
            self._socket.send_multipart((address, frame), zmq.NOBLOCK)
            return True
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return None
            raise

    def ping(self) -> None:
        """Notice peers that are gone, push backlogs on, tell who was dropped. Call it every PING_INTERVAL seconds."""
        for peer in list(self.peers.values()):
            if peer.backlog:
                self._drain(peer)
            else:
                self.send(peer, Ping())
        refused = Refused("this process did not read what it was sent")
        self._late = [peer for peer in self._late if self._try_send(peer.address, _frame(0, refused)) is False]

    def drop(self, peer: Peer) -> None:
        """Forget a peer."""
        if self.peers.pop(peer.identity, None) is not None:
            peer.backlog.clear()
            self._on_gone(peer)

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._socket.close()
        remove_socket_file(self._endpoint)


class Link:
    """A DEALER to one Server. `lost` becomes true when the connection breaks or the server refuses us."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, hello: Hello, accepted: Any) -> None:
        """Connect (in the background) and queue the Hello. `accepted` is the union of types the server may send."""
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        self.lost = False
        self.refused = ""
        self.sequence_gaps = 0
        self._sent = self._received = 0
        self._decoder = Decoder(accepted | Welcome | Refused | Ping, endpoint.rsplit("/", 1)[-1])
        self._socket = context.socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, hello.identity.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)
        self.send(hello)

    @property
    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """For a poller: the connection and its monitor."""
        return [self._socket, self._monitor]

    def filenos(self) -> list[int]:
        """The descriptors that become readable when something may be there to receive."""
        return [int(socket.getsockopt(zmq.FD)) for socket in self.sockets]

    @property
    def server(self) -> str:
        """The server's identity, once it has welcomed us."""
        return self.welcome.identity if self.welcome else ""

    def send(self, message: Message) -> bool:
        """Send without waiting; False if the link is lost or the server has stopped reading."""
        if self.lost:
            return False
        try:
            self._socket.send(_frame(self._sent, message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sent += 1
        return True

    def receive(self) -> Iterator[Any]:
        """Yield messages until nothing is left, then notice whether the connection is lost."""
        while not self.lost:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._decoder.decode(memoryview(frame)[_HEADER:])
            sequence = int.from_bytes(frame[:_HEADER], "little")
            self.sequence_gaps += sequence != self._received
            self._received = sequence + 1
            if isinstance(message, Welcome):
                self.welcome = message
            elif isinstance(message, Refused):
                self.refused = message.reason
                self.lost = True
            if message is not None and not isinstance(message, Ping):
                yield message
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self.lost = True

    def wait_welcome(self, timeout: float, cancelled: Callable[[], bool] = lambda: False) -> Welcome:
        """Block until the server has taken us in. Raises StartupError if it refuses or `timeout` seconds pass.

        `cancelled` is asked twice a second; a signal whose handler doesn't raise is noticed that way.
        """
        poller = zmq.Poller()
        for socket in self.sockets:
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + timeout
        while self.welcome is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise StartupError(f"no answer from {self.endpoint} within {timeout:.0f} s")
            if cancelled():
                raise StartupError("stopped while waiting for the engine core")
            poller.poll(int(min(left, PING_INTERVAL) * 1000) + 1)
            for _ in self.receive():
                break
            if self.refused:
                raise StartupError(f"refused by {self.endpoint}: {self.refused}")
            if self.lost:
                raise StartupError(f"lost the connection to {self.endpoint}")
        return self.welcome

    def close(self) -> None:
        """Close the connection."""
        self.lost = True
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
