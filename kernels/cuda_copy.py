"""Copies between pinned host memory and the device by the copy engines, through the driver and ctypes."""

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence

from kernels.launcher import check, driver

_ATTRIBUTES = (ctypes.c_int * 6)(1, 0, 0, 0, 0, 0)
"""A CUmemcpyAttributes: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, no hints where source and target are, no flags."""


@functools.cache
def _batch() -> Callable[..., int] | None:
    """The driver's cuMemcpyBatchAsync, with CUDA 12.8's arguments; later drivers keep it. None: the driver is older."""
    function: Callable[..., int] | None = getattr(driver(), "cuMemcpyBatchAsync", None)
    return function


def copy_async(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
    """Start copies of `sizes` bytes from addresses to addresses, ordered after what is on `stream` and in no other way.

    `stream` is a cudaStream_t, not the default one. 0.5 us each in one call of the driver, which takes as many as there
    are. Raises KernelError; then some may have been started.
    """
    batch, count = _batch(), len(sizes)
    if batch is None:
        copy_each_async(targets, sources, sizes, stream)
        return
    columns = [array("Q", values) for values in (targets, sources, sizes)]
    index, failed = ctypes.c_size_t(0), ctypes.c_size_t()
    result = batch(
        *(ctypes.c_void_p(column.buffer_info()[0]) for column in columns),
        ctypes.c_size_t(count),
        _ATTRIBUTES,
        ctypes.byref(index),
        ctypes.c_size_t(1),
        ctypes.byref(failed),
        ctypes.c_void_p(stream),
    )
    check(result, f"batch of {count} copies")


def copy_each_async(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
    """The same with a call of the driver for each, and for pageable memory, where the call takes as long as the copy.

    The GIL is free meanwhile.
    """
    copy, handle = driver().cuMemcpyAsync, ctypes.c_void_p(stream)
    for target, source, size in zip(targets, sources, sizes, strict=True):
        check(copy(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), handle), "copy")
