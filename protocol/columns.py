"""Bulk integers as bytes, little-endian: the columns of messages."""

import sys
from array import array
from typing import Any

_BIG_ENDIAN = sys.byteorder == "big"


def _pack(typecode: str, values: Any) -> bytes:
    column = array(typecode, values)
    if _BIG_ENDIAN:
        column.byteswap()
    return column.tobytes()


def _unpack(typecode: str, data: bytes) -> "array[int]":
    column: array[int] = array(typecode)
    column.frombytes(data)
    if _BIG_ENDIAN:
        column.byteswap()
    return column


def pack_i32(values: Any) -> bytes:
    """Encode an iterable of ints as little-endian int32. Raises OverflowError outside the range."""
    return _pack("i", values)


def unpack_i32(data: bytes) -> "array[int]":
    """Decode little-endian int32. Raises ValueError if the length is not a multiple of four."""
    return _unpack("i", data)


def pack_i64(values: Any) -> bytes:
    """Encode an iterable of ints as little-endian int64. Raises OverflowError outside the range."""
    return _pack("q", values)


def unpack_i64(data: bytes) -> "array[int]":
    """Decode little-endian int64. Raises ValueError if the length is not a multiple of eight."""
    return _unpack("q", data)
