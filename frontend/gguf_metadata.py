"""The tokenizer's part of a GGUF header, read straight from the mapped file.

`gguf.GGUFReader` makes several numpy arrays per token and per tensor: 1.8 s for SmolLM2, against 0.05 s here, and a
tokenizer process has to be ready in about a second. The tests compare the two.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from protocol.errors import StartupError

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class _Cursor:
    """Reads values one after the other; raises ValueError or struct.error where the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._offset = len(MAGIC)

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self._data, self._offset)
        self._offset += struct.calcsize(layout)
        return values

    def strings(self, count: int) -> list[str]:
        data, offset, values = self._data, self._offset, []
        for _ in range(count):
            start = offset + 8
            offset = start + int.from_bytes(data[offset:start], "little")
            values.append(data[start:offset].decode("utf-8", "replace"))
            if offset > len(data):
                raise ValueError("a string reaches past the end of the file")
        self._offset = offset
        return values

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.strings(1)[0]
        if kind == _ARRAY:
            kind, count = *self.scalars("I", 1), *self.scalars("Q", 1)
            if kind == _STRING:
                return self.strings(count)
            if kind == _ARRAY:
                return [self.value(kind) for _ in range(count)]
            return list(self.scalars(_SCALARS[kind], count))
        return self.scalars(_SCALARS[kind], 1)[0]


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return every key and value of the header of a GGUF file (version 2 or 3, little-endian).

    Arrays become lists; bytes of a string that are not UTF-8 become U+FFFD. Raises StartupError if the file can't be
    read or is not such a file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[: len(MAGIC)] != MAGIC:
                raise ValueError("no GGUF magic")
            cursor = _Cursor(data)
            version = cursor.scalars("I", 1)[0]
            if version not in (2, 3):
                raise ValueError(f"version {version} is not 2 or 3, or the file is big-endian")
            _, count = cursor.scalars("Q", 2)
            metadata: dict[str, Any] = {}
            for _ in range(count):
                key = cursor.strings(1)[0]
                metadata[key] = cursor.value(cursor.scalars("I", 1)[0])
            return metadata
    except (OSError, ValueError, KeyError, struct.error, OverflowError, MemoryError) as error:
        raise StartupError(f"{path}: not a readable GGUF file: {error}") from error
