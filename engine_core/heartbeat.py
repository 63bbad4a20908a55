"""The thread that publishes CoreStatus, so that everybody knows whether the step loop moves."""

import threading
from collections.abc import Callable

import zmq

from protocol.channels import remove_socket_file
from protocol.codec import encode
from protocol.errors import StartupError
from protocol.status import CoreStatus

INTERVAL = 0.25  # seconds


class Heartbeat(threading.Thread):
    """Publishes what `snapshot` returns. It only reads what the step loop counts, and takes no lock."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, snapshot: Callable[[], CoreStatus]
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.stopping = threading.Event()
        self._snapshot = snapshot
        self._endpoint = endpoint
        self._socket = context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 4)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise StartupError(f"can't bind {endpoint}: {error.strerror}") from error

    def run(self) -> None:
        """Publish until `stopping` is set."""
        while not self.stopping.wait(INTERVAL):
            self._socket.send(encode(self._snapshot()), zmq.NOBLOCK)
        self._socket.close()
        remove_socket_file(self._endpoint)
