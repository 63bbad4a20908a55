"""Copies of block images between the device pool and a host pool; here for the `cpu` device, where both are RAM.

The rules are those of a GPU's copy streams: a copy starts after the steps launched before it, copies of one direction
run in order, both directions run at once, and nobody waits. The steps of the `cpu` device end within their launch, so
"after them" is at once.
"""

import contextlib
import logging
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_core.device import free_memory
from engine_core.plan import Copy, Landed

SLAB_BYTES, PINNED_SLAB_BYTES = 64 << 20, 16 << 20  # pinning holds up launches, so it comes in small portions
GROUP_BYTES, GROUP_BLOCKS = 16 << 20, 32  # what lands together at most: the first of many blocks are of use early
LOG_INTERVAL = 10.0  # seconds

_log = logging.getLogger("pagetide.core")
_Images = NDArray[np.uint8]  # [n, image_bytes]


class HostPool:
    """An array of block images in host memory, with each image's tag. A thread makes it, slab by slab.

    Pageable slabs take no memory before they are written. From the first slab on that can't be pinned all are pageable,
    and `pinned` is False. Where a slab can't be had the pool ends. Both give one warning.
    """

    def __init__(self, image_bytes: int, budget: int, pinned: bool = False, slab_bytes: int = 0) -> None:
        """`budget` is the bytes of all images at most."""
        self.image_bytes, self.max_blocks = image_bytes, budget // image_bytes
        self.slab_blocks = max(1, (slab_bytes or (PINNED_SLAB_BYTES if pinned else SLAB_BYTES)) // image_bytes)
        self.host_blocks = 0  # images that may be used by now
        self.tags: dict[int, int] = {}  # of what is stored, by block; none while it is being written
        self.pinned = pinned
        self.made = threading.Event()  # no more slabs follow
        self._slabs: list[_Images] = []
        self.addresses: list[int] = []  # where each image begins
        self._registered: list[int] = []  # addresses of pinned slabs
        # Memory that is given back while it is registered stays pinned for the driver, whoever has its address next.
        self._unpin = weakref.finalize(self, _unpin, self._registered)
        self._unpin.atexit = False
        self._closing = False
        # No daemon: a process that ends while a thread of it pins memory may crash.
        threading.Thread(target=self._make, name="host-pool").start()

    def images(self, first: int, count: int) -> _Images:
        """View blocks `[first, first + count)`, which are in one slab. Raises IndexError if they are not there."""
        slab, row = divmod(first, self.slab_blocks)
        if slab < 0:
            raise IndexError(f"host block {first}")
        return _rows(self._slabs[slab], row, count)

    def close(self) -> None:
        """Make no more slabs, and unpin those that are there: nothing may be copying any more."""
        self._closing = True
        if self.made.wait(5.0):
            self._unpin()

    def _make(self) -> None:
        # Pageable slabs are promises: half of what is free is what the machine can surely keep.
        room = free_memory(torch.device("cpu"))[0] // 2
        try:
            while (left := self.max_blocks - self.host_blocks) > 0 and not self._is_ending():
                count = min(left, self.slab_blocks)
                if (self.host_blocks + count) * self.image_bytes > room:
                    raise MemoryError(f"{room >> 20} MiB are half of the free RAM")
                started = time.monotonic()
                self._append(_allocate(self, count))
                self.host_blocks += count
                if self.pinned:
                    time.sleep(2 * (time.monotonic() - started))
        except (MemoryError, RuntimeError) as error:
            _log.warning(
                "host memory for the KV of swapped requests ends at %d of %d MiB (this is RAM, not GPU memory): %s",
                self.host_blocks * self.image_bytes >> 20,
                self.max_blocks * self.image_bytes >> 20,
                error,
            )
        finally:
            self.made.set()

    def _is_ending(self) -> bool:
        return self._closing or not threading.main_thread().is_alive()  # then the process ends, closed or not

    def _append(self, slab: Tensor) -> None:
        if self.pinned:
            try:
                _pin(slab)
                self._registered.append(slab.data_ptr())
            except (RuntimeError, AssertionError) as error:  # the latter: torch without CUDA
                self.pinned = False
                _log.warning("can't pin host memory (RAM, not GPU memory), so swaps are slower: %s", error)
        first = slab.data_ptr()
        self.addresses += range(first, first + slab.numel(), self.image_bytes)
        self._slabs.append(slab.numpy())


def _allocate(host: HostPool, count: int) -> Tensor:
    """A slab, `uint8[count, image_bytes]`, not touched yet."""
    if not host.pinned:
        return torch.empty((count, host.image_bytes), dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, count * host.image_bytes)
    except OSError as error:
        raise MemoryError(str(error)) from error
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, host.image_bytes)


def _pin(slab: Tensor) -> None:
    """Page-lock a slab, without the GIL. Raises RuntimeError.

    Huge pages that several threads have touched before take a tenth of cudaHostAlloc's time (0.6 s/GiB), and it is time
    in which the driver may hold up launches.
    """
    driver, portable = torch.cuda.cudart(), 1  # type: ignore[no-untyped-call]
    slab.zero_()
    torch.cuda.check_error(driver.cudaHostRegister(slab.data_ptr(), slab.numel(), portable))


def _unpin(addresses: list[int]) -> None:
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())  # type: ignore[no-untyped-call]


class Link:
    """When bytes arrive over a link of a given rate, one after the other: to imitate one slower than the machine's."""

    def __init__(self, bytes_per_second: int) -> None:
        """0: they arrive at once."""
        self._rate, self._free = bytes_per_second, 0.0

    def duration(self, size: int) -> float:
        """Seconds that `size` bytes take."""
        return size / self._rate if self._rate else 0.0

    def arrival(self, size: int, now: float) -> float:
        """The time at which `size` bytes that are sent now, after all those before, have arrived."""
        self._free = max(now, self._free) + self.duration(size)
        return self._free


def adjacent_runs(copies: Sequence[Copy], slab_blocks: int) -> Iterator[list[Copy]]:
    """Split copies where blocks stop being adjacent in either pool: a run moves at once."""
    run: list[Copy] = []
    for copy in copies:
        if run and (copy.device != run[-1].device + 1 or copy.host != run[-1].host + 1 or copy.host % slab_blocks == 0):
            yield run
            run = []
        run.append(copy)
    yield run


class CpuTransfer:
    """A `Transfer` with a thread for each direction. Bytes move without the GIL and without torch's threads."""

    poll_interval = 0.0

    def __init__(
        self,
        pool: Tensor,
        host: HostPool,
        wake: Callable[[], None],
        gate: Callable[[Copy], None] | None = None,
        bandwidth_limit: int = 0,
    ) -> None:
        """`pool` is `uint8[num_blocks, image_bytes]`. `wake` is called in a copying thread whenever copies landed.

        `bandwidth_limit` is bytes per second and direction at most; 0: none. `gate`, for tests, is called before a
        copy's bytes move, and may wait or raise; each copy then lands alone.
        """
        self.host, self.host_blocks = host, host.host_blocks
        self._pool: _Images = pool.numpy()
        self._wake, self._gate = wake, gate
        self._group = 1 if gate else max(1, min(GROUP_BLOCKS, GROUP_BYTES // host.image_bytes))
        self._landed: deque[Landed] = deque()
        self._last_log = float("-inf")
        self._closing = threading.Event()
        self._links = {out: Link(bandwidth_limit) for out in (True, False)}
        self._queues: dict[bool, SimpleQueue[Sequence[Copy]]] = {out: SimpleQueue() for out in (True, False)}
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"copy-{'out' if out else 'in'}", daemon=True)
            for out, queue in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    def start(self, copies: Sequence[Copy]) -> None:
        """See `Transfer`."""
        for out, queue in self._queues.items():
            if some := [copy for copy in copies if copy.out == out]:
                queue.put(some)

    def landed(self) -> list[Landed]:
        """See `Transfer`."""
        self.host_blocks = self.host.host_blocks
        return [self._landed.popleft() for _ in range(len(self._landed))]

    def close(self) -> None:
        """See `Transfer`. A run of adjacent blocks that is being moved is moved to its end."""
        self._closing.set()
        self.host.close()
        for queue in self._queues.values():
            queue.put([])
        for thread in self._threads:
            thread.join(1.0)

    def _work(self, queue: "SimpleQueue[Sequence[Copy]]") -> None:
        while copies := queue.get():
            for first in range(0, len(copies), self._group):
                if self._closing.is_set():
                    return
                self._land(copies[first : first + self._group])

    def _land(self, copies: Sequence[Copy]) -> None:
        started = time.perf_counter()
        good: list[Copy] = []
        bad: list[Copy] = []
        due = self._links[copies[0].out].arrival(len(copies) * self.host.image_bytes, started)
        for run in adjacent_runs(copies, self.host.slab_blocks):
            try:
                stale = self._move(run)
            except Exception as error:
                stale = run
                self._report(run, error)
            bad += stale
            good += (copy for copy in run if copy not in stale) if stale else run
        self._closing.wait(max(0.0, due - time.perf_counter()))
        seconds = (time.perf_counter() - started) / len(copies)
        for some, ok in ((good, True), (bad, False)):
            if some:
                self._landed.append(Landed(some, ok, seconds * len(some)))
        self._wake()

    def _move(self, run: list[Copy]) -> list[Copy]:
        """Move a run's bytes; return copies in whose content was not what their tags say."""
        if self._gate:
            self._gate(run[0])
        tags = self.host.tags
        device = _rows(self._pool, run[0].device, len(run))
        host = self.host.images(run[0].host, len(run))
        if run[0].out:
            for copy in run:
                tags.pop(copy.host, None)
            np.copyto(host, device)
            tags.update((copy.host, copy.tag) for copy in run)
            return []
        # Before and after: what is overwritten meanwhile loses its tag first.
        stale = [copy for copy in run if tags.get(copy.host) != copy.tag]
        if len(stale) < len(run):
            np.copyto(device, host)
            stale += [copy for copy in run if tags.get(copy.host) != copy.tag and copy not in stale]
        if stale:
            self._report(stale, "the host block holds something else")
        return stale

    def _report(self, copies: list[Copy], why: Any) -> None:
        now = time.monotonic()
        if now - self._last_log >= LOG_INTERVAL:
            self._last_log = now
            _log.warning("copy of %d blocks failed, first %s: %s", len(copies), copies[0], why)


def _rows(images: _Images, first: int, count: int) -> _Images:
    """`images[first : first + count]`, all of them: a slice would be shorter, and numpy stretch what goes there."""
    if not 0 <= first <= first + count <= len(images):
        raise IndexError(f"blocks {first} to {first + count} of {len(images)}")
    return images[first : first + count]
