"""The header of a safetensors file. Format: https://huggingface.co/docs/safetensors, "Format"."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_core.model.reading import ModelFile, Stored
from protocol.errors import StartupError

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_LONGEST_HEADER = 100_000_000  # bytes, the format's own limit


@dataclass(frozen=True)
class Unknown:
    """A tensor of a type that no model here has."""

    dtype: str


def read_safetensors(path: Path) -> dict[str, Stored | Unknown]:
    """The tensors of a file by name. Raises StartupError if it is damaged or not whole."""
    try:
        file = ModelFile(path)
        with path.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(_LONGEST_HEADER, file.size - 8):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        return {name: _tensor(file, name, entry, 8 + length) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise StartupError(f"can't read {path}: {type(error).__name__}: {error}") from error


def _tensor(file: ModelFile, name: str, entry: dict[str, Any], data: int) -> Stored | Unknown:
    if entry["dtype"] not in _DTYPES:
        return Unknown(str(entry["dtype"]))
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    is_whole = all(type(number) is int and number >= 0 for number in (start, *shape))
    if not is_whole or math.prod(filter(None, shape)) >> 48:  # also of an empty one: torch multiplies them
        raise ValueError(f"{name} has the shape {shape} at {start}")
    tensor = Stored(file, _DTYPES[entry["dtype"]], shape, data + start)
    if tensor.nbytes != end - start:
        raise ValueError(f"{name} has {end - start} bytes, {tensor.nbytes} expected")
    if data + end > file.size:
        raise ValueError(f"{name} ends beyond the file: is the download complete?")
    return tensor
