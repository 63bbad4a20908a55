"""Copies of block images between the device pool and a host pool; here for the `cpu` device, where both are RAM.

The rules are those of a GPU's copy streams: a copy starts after the steps launched before it, copies of one direction
run in order, both directions run at once, and nobody waits. The steps of the `cpu` device end within their launch, so
"after them" is at once.
"""

import logging
import threading
import time
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

SLAB_BYTES = 64 << 20
GROUP_BYTES, GROUP_BLOCKS = 16 << 20, 32  # what lands together at most: the first of many blocks are of use early
LOG_INTERVAL = 10.0  # seconds

_log = logging.getLogger("pagetide.core")
_Images = NDArray[np.uint8]  # [n, image_bytes]


class HostPool:
    """An array of block images in host memory, with each image's tag. A thread makes it, slab by slab.

    Pageable slabs take no memory before they are written. Where a slab can't be had the pool ends, with a warning.
    """

    def __init__(self, image_bytes: int, budget: int, pinned: bool = False, slab_bytes: int = SLAB_BYTES) -> None:
        """`budget` is the bytes of all images at most."""
        self.image_bytes, self.max_blocks = image_bytes, budget // image_bytes
        self.slab_blocks = max(1, slab_bytes // image_bytes)
        self.host_blocks = 0  # images that may be used by now
        self.tags: dict[int, int] = {}  # of what is stored, by block; none while it is being written
        self.pinned = pinned
        self.made = threading.Event()  # no more slabs follow
        self._slabs: list[_Images] = []
        self._closing = False
        threading.Thread(target=self._make, name="host-pool", daemon=True).start()

    def images(self, first: int, count: int) -> _Images:
        """View blocks `[first, first + count)`, which are in one slab. Raises IndexError if they are not there."""
        slab, row = divmod(first, self.slab_blocks)
        if slab < 0:
            raise IndexError(f"host block {first}")
        return _rows(self._slabs[slab], row, count)

    def close(self) -> None:
        """Make no more slabs."""
        self._closing = True

    def _make(self) -> None:
        # Pageable slabs are promises: half of what is free is what the machine can surely keep.
        room = free_memory(torch.device("cpu"))[0] // 2
        try:
            while (left := self.max_blocks - self.host_blocks) > 0 and not self._closing:
                count = min(left, self.slab_blocks)
                if (self.host_blocks + count) * self.image_bytes > room:
                    raise MemoryError(f"{room >> 20} MiB are half of the free RAM")
                self._slabs.append(_allocate(self, count).numpy())
                self.host_blocks += count
        except (MemoryError, RuntimeError) as error:
            _log.warning(
                "host memory for the KV of swapped requests ends at %d of %d MiB (this is RAM, not GPU memory): %s",
                self.host_blocks * self.image_bytes >> 20,
                self.max_blocks * self.image_bytes >> 20,
                error,
            )
        finally:
            self.made.set()


def _allocate(host: HostPool, count: int) -> Tensor:
    """A slab, `uint8[count, image_bytes]`; pageable from the first one on that can't be pinned."""
    shape = (count, host.image_bytes)
    if host.pinned:
        try:
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            host.pinned = False
            _log.warning("can't pin host memory (RAM, not GPU memory), so swaps are slower: %s", error)
    return torch.empty(shape, dtype=torch.uint8)


class CpuTransfer:
    """A `Transfer` with a thread for each direction. Bytes move without the GIL and without torch's threads."""

    def __init__(
        self,
        pool: Tensor,
        host: HostPool,
        wake: Callable[[], None],
        gate: Callable[[Copy], None] | None = None,
    ) -> None:
        """`pool` is `uint8[num_blocks, image_bytes]`. `wake` is called in a copying thread whenever copies landed.

        `gate`, for tests, is called before a copy's bytes move, and may wait or raise; each copy then lands alone.
        """
        self.host, self.host_blocks = host, host.host_blocks
        self._pool: _Images = pool.numpy()
        self._wake, self._gate = wake, gate
        self._group = 1 if gate else max(1, min(GROUP_BLOCKS, GROUP_BYTES // host.image_bytes))
        self._landed: deque[Landed] = deque()
        self._last_log = float("-inf")
        self._closing = False
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
        self._closing = True
        self.host.close()
        for queue in self._queues.values():
            queue.put([])
        for thread in self._threads:
            thread.join(1.0)

    def _work(self, queue: "SimpleQueue[Sequence[Copy]]") -> None:
        while copies := queue.get():
            for first in range(0, len(copies), self._group):
                if self._closing:
                    return
                self._land(copies[first : first + self._group])

    def _land(self, copies: Sequence[Copy]) -> None:
        started = time.perf_counter()
        good: list[Copy] = []
        bad: list[Copy] = []
        for run in self._runs(copies):
            try:
                stale = self._move(run)
            except Exception as error:
                stale = run
                self._report(run, error)
            bad += stale
            good += (copy for copy in run if copy not in stale) if stale else run
        seconds = (time.perf_counter() - started) / len(copies)
        for some, ok in ((good, True), (bad, False)):
            if some:
                self._landed.append(Landed(some, ok, seconds * len(some)))
        self._wake()

    def _runs(self, copies: Sequence[Copy]) -> Iterator[list[Copy]]:
        """Split where blocks stop being adjacent in either pool: a run moves at once."""
        run: list[Copy] = []
        for copy in copies:
            if run and (
                copy.device != run[-1].device + 1
                or copy.host != run[-1].host + 1
                or copy.host % self.host.slab_blocks == 0
            ):
                yield run
                run = []
            run.append(copy)
        yield run

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
