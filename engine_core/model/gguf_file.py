"""The header of a GGUF file. Reads metadata and the tensor list without building the tokenizer's arrays, which is what
makes `gguf.GGUFReader` take seconds on large vocabularies. Format: ggml's docs/gguf.md, versions 2 and 3.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine_core.model.reading import ModelFile
from protocol.errors import StartupError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LONGEST_ARRAY = 1024  # longer ones belong to the tokenizer: skipped


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor list. `shape` is in numpy order (rows first), `offset` counts from the file's start."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Skipped:
    count: int


class GGUFFile:
    """Metadata and tensors of a GGUF file. Of arrays with more than 1,024 elements only the length is kept."""

    def __init__(self, path: Path) -> None:
        """Raises StartupError if `path` is not a whole little-endian GGUF file of version 2 or 3."""
        self.path = path
        try:
            self.file = ModelFile(path)
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._at = 0
            self._read_header()
        except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError, struct.error) as error:
            raise StartupError(f"{path} is not a readable GGUF file: {type(error).__name__}: {error}") from error

    def array_length(self, key: str) -> int:
        """Elements of a metadata array; 0 if there is none."""
        found = self.metadata.get(key)
        return self.skipped.get(key, len(found) if isinstance(found, list) else 0)

    def _read_header(self) -> None:
        magic, version, tensor_count, pair_count = self._take("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        self.metadata: dict[str, Any] = {}
        self.skipped: dict[str, int] = {}
        for _ in range(pair_count):
            key = self._string()
            value = self._value(self._take("<I")[0])
            if isinstance(value, _Skipped):
                self.skipped[key] = value.count
            else:
                self.metadata[key] = value
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset in entries:
            block, size = GGML_QUANT_SIZES[kind]
            if shape and shape[-1] % block:
                raise ValueError(f"tensor {name} has rows of {shape[-1]}, not of whole blocks")
            nbytes = math.prod(shape) // block * size
            if start + offset + nbytes > len(self._map):
                raise ValueError(f"tensor {name} ends beyond the file: is the download complete?")
            self.tensors[name] = GGUFTensor(name, kind, shape, start + offset, nbytes)

    def _tensor_entry(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._string()
        (dimensions,) = self._take("<I")
        if dimensions > 4:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = self._take(f"<{dimensions}Q")[::-1]
        kind, offset = self._take("<IQ")
        return name, GGMLQuantizationType(kind), shape, offset

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._map, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._take("<Q")
        text = self._map[self._at : self._at + length]
        if len(text) != length:
            raise ValueError("the file ends inside a string")
        self._at += length
        return text.decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take(_SCALARS[kind])[0]
        element, count = self._take("<IQ")
        if count <= _LONGEST_ARRAY:
            return [self._value(element) for _ in range(count)]
        if element == _STRING:
            self._skip_strings(count)
        else:
            self._at += count * struct.calcsize(_SCALARS[element])
        return _Skipped(count)

    def _skip_strings(self, count: int) -> None:
        unpack, at, data = struct.Struct("<Q").unpack_from, self._at, self._map
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self._at = at
