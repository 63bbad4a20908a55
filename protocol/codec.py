"""Messages to bytes and back. Decoding is guarded: whatever arrives, the caller gets a message or None."""

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from protocol.messages import Message, Role

_log = logging.getLogger("pagetide.wire")
_encoder = msgspec.msgpack.Encoder()

encode: Callable[[Message], bytes] = _encoder.encode


class Decoder:
    """Decodes the message types that one socket takes; anything else is counted, logged now and then, and dropped."""

    LOG_INTERVAL = 10.0  # seconds

    def __init__(self, accepted: Any, where: str) -> None:
        """`accepted` is a Message class or a union of them; `where` names the socket in the log."""
        self._decoder = msgspec.msgpack.Decoder(accepted)
        self._where = where
        self._last_log = float("-inf")
        self.dropped = 0

    def decode(self, data: bytes | memoryview) -> Any | None:
        """Return the message, or None if `data` is not one that this socket takes."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            self.drop(str(error))
            return None

    def drop(self, reason: str) -> None:
        """Count a message that can't be taken."""
        self.dropped += 1
        now = time.monotonic()
        if now - self._last_log >= self.LOG_INTERVAL:
            self._last_log = now
            _log.warning("%s: dropped a bad message (%d so far): %s", self._where, self.dropped, reason[:200])


def as_objects(value: Any) -> Any:
    """Turn a message, an array on the wire, into dicts with its fields' names, for JSON that people read."""
    if isinstance(value, msgspec.Struct):
        return {name: as_objects(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list):
        return [as_objects(item) for item in value]
    return value.name.lower() if isinstance(value, Role) else value
