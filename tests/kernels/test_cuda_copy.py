"""What the driver is asked for; that it copies is tests/engine_core/test_cuda_transfer.py's to see."""

import ctypes
from typing import Any

import pytest

from kernels import cuda_copy
from kernels.cuda_copy import copy_async


def values(pointer: ctypes.c_void_p, count: int) -> list[int]:
    assert pointer.value is not None
    return list((ctypes.c_uint64 * count).from_address(pointer.value))


def test_a_batch_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def batch(targets: Any, sources: Any, sizes: Any, count: Any, *rest: Any) -> int:
        calls.append([values(column, count.value) for column in (targets, sources, sizes)])
        attributes, _, kinds, _, stream = rest
        assert (attributes[0], kinds.value, stream.value) == (1, 1, 77), "sources are to be read in stream order"
        return 0

    monkeypatch.setattr(cuda_copy, "_batch", lambda: batch)
    top = (1 << 63) + 4096
    copy_async([top, 2], [3, 4], [5, 6 << 30], 77)
    assert calls == [[[top, 2], [3, 4], [5, 6 << 30]]]


def test_an_old_driver_gets_a_call_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Driver:
        @staticmethod
        def cuMemcpyAsync(*arguments: Any) -> int:
            calls.append([argument.value for argument in arguments])
            return 0

    monkeypatch.setattr(cuda_copy, "_batch", lambda: None)
    monkeypatch.setattr(cuda_copy, "driver", Driver)
    copy_async([1, 2], [3, 4], [5, 6], 77)
    assert calls == [[1, 3, 5, 77], [2, 4, 6, 77]]
