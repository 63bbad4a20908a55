"""Bytes of a model's files: asked for ahead of time, and read straight to where they belong."""

import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from threading import Condition, Thread
from typing import Self

import torch
from torch import Tensor

from protocol.errors import StartupError

_CHUNK = 8 << 20  # bytes of a staging buffer
_SLOTS = 4  # staging buffers: reads and copies in flight
_CONVERTED = 1 << 24  # elements that are converted at a time
_AHEAD = 256 << 20  # bytes that the disk may be ahead of the loader


class ModelFile:
    """A file whose tensors are read in place. Only one thread at a time may read tensors of a GPU."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def will_need(self, offset: int, nbytes: int) -> None:
        """Have the system start to read these bytes into its cache."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def fill(self, offset: int, out: Tensor) -> None:
        """Read to uint8 `[n]` in host memory. Raises StartupError."""
        rest = memoryview(out.numpy())  # type: ignore[arg-type]
        try:
            while rest:  # the system gives 2 GiB at a time at most
                count = os.preadv(self._descriptor, [rest], offset)
                if not count:
                    raise StartupError(f"{self.path} ended while it was read")
                rest, offset = rest[count:], offset + count
        except OSError as error:
            raise StartupError(f"can't read {self.path}: {error}") from error

    def read(self, offset: int, out: Tensor) -> None:
        """Read to a contiguous tensor on any device; on a GPU it is there for what follows on the current stream."""
        raw = out.view(-1).view(torch.uint8)
        if out.device.type == "cpu":
            self.fill(offset, raw)
        else:
            staging().copy(self, offset, raw)


class Staging:
    """Host buffers between a file and a GPU: while one is copied to the device, others are read, each by a thread."""

    def __init__(self, pinned: bool) -> None:
        """Unpinned buffers are for tests on the CPU."""
        self._buffers = [torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=pinned) for _ in range(_SLOTS)]
        self._copied = [torch.cuda.Event() for _ in self._buffers] if pinned else []  # type: ignore[no-untyped-call]
        self._next = cycle(range(_SLOTS))
        self._pool = ThreadPoolExecutor(_SLOTS, "read")

    def copy(self, file: ModelFile, offset: int, out: Tensor) -> None:
        """Read `out.numel()` bytes to uint8 `[n]` on the device. When it returns the last copies may be in flight."""
        reads: deque[tuple[Future[None], int, Tensor]] = deque()

        def land() -> None:
            read, slot, part = reads.popleft()
            read.result()
            part.copy_(self._buffers[slot][: len(part)], non_blocking=True)
            if self._copied:
                self._copied[slot].record()

        for start in range(0, len(out), _CHUNK):
            if len(reads) == _SLOTS:
                land()  # the slots go round: the oldest read has the one that is next
            slot, part = next(self._next), out[start : start + _CHUNK]
            if self._copied:
                self._copied[slot].synchronize()
            reads.append((self._pool.submit(file.fill, offset + start, self._buffers[slot][: len(part)]), slot, part))
        while reads:
            land()


@cache
def staging() -> Staging:
    """Those of the load that goes on; `cache_clear` after it."""
    return Staging(pinned=True)


@dataclass(frozen=True)
class Stored:
    """A tensor as a file holds it, row by row."""

    file: ModelFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.dtype.itemsize * math.prod(self.shape)

    def will_need(self) -> None:
        """See `ModelFile`."""
        self.file.will_need(self.offset, self.nbytes)

    def read(self, device: torch.device | str = "cpu") -> Tensor:
        """The tensor, on a device. Raises StartupError."""
        out = torch.empty(self.shape, dtype=self.dtype, device=device)
        self.file.read(self.offset, out)
        return out

    def read_to(self, out: Tensor) -> None:
        """Read to a contiguous tensor of this shape, in its dtype and on its device. Raises StartupError."""
        if out.dtype == self.dtype:
            self.file.read(self.offset, out)
            return
        flat = out.view(-1)
        for start in range(0, len(flat), _CONVERTED):
            part = flat[start : start + _CONVERTED]
            offset = self.offset + start * self.dtype.itemsize
            part.copy_(Stored(self.file, self.dtype, (len(part),), offset).read(out.device))


class ReadAhead:
    """While it is open, a thread has the system read pieces in turn, a little ahead of the loader."""

    def __init__(self, pieces: Iterable[tuple[Callable[[], None], int]]) -> None:
        """Of each piece what asks for it, and its bytes."""
        self._pieces = pieces
        self._lead, self._is_open = 0, True
        self._moved = Condition()
        self._thread = Thread(target=self._run, name="read ahead", daemon=True)

    def loaded(self, count: int) -> None:
        """So many more bytes are loaded."""
        with self._moved:
            self._lead -= count
            self._moved.notify()

    def _run(self) -> None:
        for ask, count in self._pieces:
            ask()
            with self._moved:
                self._lead += count
                self._moved.wait_for(lambda: self._lead < _AHEAD or not self._is_open)
                if not self._is_open:
                    return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._moved:
            self._is_open = False
            self._moved.notify()
        self._thread.join()
