"""Copies of block images between the device pool and a host pool on two copy streams of a CUDA device, out and in.

Order: a copy comes after an event that the compute stream has at its start, so after all steps launched until then:
those that write what it reads, and those that read what it overwrites. It has landed when an event behind it has
passed; only then are its blocks handed out, so steps that use them are launched after it. Nobody waits for either.

Nobody is woken either: who sleeps until copies land asks again every `poll_interval`. A callback of the driver
(cuLaunchHostFunc) would need the GIL, and its copy stream would stand still until it had it: 5 ms if Python is busy.

Pageable host memory, where none could be pinned: the driver's calls then take as long as the copies, so threads make
them.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from engine_core.plan import Copy, Landed
from engine_core.transfer import GROUP_BYTES, LOG_INTERVAL, HostPool, Link
from kernels.cuda_copy import copy_async, copy_each_async

GROUP_BLOCKS = 256
POLL_INTERVAL = 200e-6  # seconds: the time of a group of copies over a fast link

_log = logging.getLogger("pagetide.core")


@dataclass(slots=True, eq=False)
class _Group:
    """Copies that land together."""

    copies: Sequence[Copy]
    begin: torch.cuda.Event
    end: torch.cuda.Event
    due: float  # seconds, perf_counter: they don't land before
    is_launched: bool = False  # `end` is on the stream
    ok: bool = True

    def has_ended(self) -> bool:
        """Whether all that was put on the stream up to `end` is done."""
        return bool(self.end.query())  # type: ignore[no-untyped-call]


class _Direction:
    """A copy stream, and what is in flight on it, in order."""

    def __init__(self, device: torch.device, bandwidth_limit: int) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.groups: deque[_Group] = deque()
        self.link = Link(bandwidth_limit)
        self.thread: ThreadPoolExecutor | None = None  # makes the driver's calls, once a slab is pageable

    def ended(self) -> Iterator[_Group]:
        """Take out, in order, the groups that have ended."""
        now = time.perf_counter()
        while self.groups and (first := self.groups[0]).is_launched and first.due <= now and first.has_ended():
            yield self.groups.popleft()


class CudaTransfer:
    """A `Transfer` of a CUDA device. Made, and called, in the thread that launches the steps."""

    def __init__(
        self, pool: Tensor, host: HostPool, stream: torch.cuda.Stream | None = None, bandwidth_limit: int = 0
    ) -> None:
        """`pool` is `uint8[num_blocks, image_bytes]` on the device. `stream` runs the steps; None: the current one.

        `bandwidth_limit`: bytes per second and direction at most, to imitate a slower link; 0: none. Copies land as
        late as over such a link, though they end earlier.
        """
        self.host, self.host_blocks = host, host.host_blocks
        self._pool, self._base, self._image = pool, pool.data_ptr(), host.image_bytes
        self._device, self._compute = pool.device, stream
        self._directions = {out: _Direction(pool.device, bandwidth_limit) for out in (True, False)}
        self._group = max(1, min(GROUP_BLOCKS, GROUP_BYTES // host.image_bytes))
        self._started = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._spare: list[torch.cuda.Event] = []
        self._leaving: dict[int, int] = {}  # tags of copies out in flight, by host block
        self._refused: list[Copy] = []
        self._last_log = float("-inf")

    @property
    def poll_interval(self) -> float:
        """Seconds after which to call `landed` again; 0: nothing is in flight."""
        is_moving = self._refused or any(direction.groups for direction in self._directions.values())
        return POLL_INTERVAL if is_moving else 0.0

    def start(self, copies: Sequence[Copy]) -> None:
        """See `Transfer`. The directions take turns, so that neither waits for the other's launches."""
        self._started.record(self._compute or torch.cuda.current_stream(self._device))
        waiting: list[list[tuple[_Direction, list[Copy]]]] = []
        for out, direction in self._directions.items():
            some = [copy for copy in copies if copy.out == out]
            if some:
                direction.stream.wait_event(self._started)
            waiting.append([(direction, some[n : n + self._group]) for n in range(0, len(some), self._group)])
        for turn in zip_longest(*waiting):
            for entry in turn:
                if entry is not None:
                    self._launch(*entry)

    def landed(self) -> list[Landed]:
        """See `Transfer`."""
        self.host_blocks = self.host.host_blocks
        # A copy in may come right after the copy out of the same image: had it ended, so had the other one.
        arrived = list(self._directions[False].ended())
        found = [self._land(group) for group in self._directions[True].ended()]
        for group in arrived:
            stale = [copy for copy in group.copies if self.host.tags.get(copy.host) != copy.tag]
            if stale:
                self._refuse(stale, "the host block was given to another")
                group.copies = [copy for copy in group.copies if copy not in stale]
            if group.copies:
                found.append(self._land(group))
        if self._refused:
            found.append(Landed(self._refused, False, 0.0))
            self._refused = []
        return found

    def close(self) -> None:
        """See `Transfer`. Waits for the copies in flight: the host pool is unpinned."""
        for direction in self._directions.values():
            if direction.thread is not None:
                direction.thread.shutdown(cancel_futures=True)
            direction.stream.synchronize()
        self.host.close()

    def _launch(self, direction: _Direction, copies: list[Copy]) -> None:
        """Put those copies on the stream whose blocks are there and hold what their tags say, as one group."""
        good, hosts, devices, sizes = self._runs(direction, copies)
        if not good:
            return
        due = direction.link.arrival(len(good) * self._image, time.perf_counter())
        group = _Group(good, self._event(), self._event(), due)
        direction.groups.append(group)
        pieces = (hosts, devices, sizes) if good[0].out else (devices, hosts, sizes)
        if direction.thread is None and not self.host.pinned:
            direction.thread = ThreadPoolExecutor(1, "copy")
        if direction.thread is None:
            self._copy(direction.stream, group, *pieces)
        else:
            direction.thread.submit(self._copy, direction.stream, group, *pieces)

    def _runs(self, direction: _Direction, copies: list[Copy]) -> tuple[list[Copy], list[int], list[int], list[int]]:
        """The copies that can be made; host addresses, device addresses and bytes of their runs of adjacent blocks.

        One loop, as the step loop pays for it by the block.
        """
        good: list[Copy] = []
        hosts: list[int] = []
        devices: list[int] = []
        sizes: list[int] = []
        tags, leaving, addresses = self.host.tags, self._leaving, self.host.addresses
        base, image, slab = self._base, self._image, self.host.slab_blocks
        num_devices, num_hosts, is_pinned = len(self._pool), self.host.host_blocks, self.host.pinned
        after = after_host = -1
        for copy in copies:
            device, host, tag = copy.device, copy.host, copy.tag
            if not (0 <= device < num_devices and 0 <= host < num_hosts):
                self._refuse([copy], "there is no such block")
                continue
            if copy.out:
                tags.pop(host, None)
                leaving[host] = tag
            elif tags.get(host) != tag:
                if not is_pinned or leaving.get(host) != tag:
                    self._refuse([copy], "the host block holds something else")
                    continue
                direction.stream.wait_stream(self._directions[True].stream)
            good.append(copy)
            if device == after and host == after_host and host % slab:
                sizes[-1] += image
            else:
                hosts.append(addresses[host])
                devices.append(base + device * image)
                sizes.append(image)
            after, after_host = device + 1, host + 1
        return good, hosts, devices, sizes

    def _copy(
        self, stream: torch.cuda.Stream, group: _Group, targets: list[int], sources: list[int], sizes: list[int]
    ) -> None:
        """Start the copies of a group. Events that can't be recorded mean a broken device: that raises."""
        group.begin.record(stream)
        try:
            (copy_async if self.host.pinned else copy_each_async)(targets, sources, sizes, stream.cuda_stream)
        except RuntimeError as error:
            group.ok = False
            self._report(group.copies, str(error))
        group.end.record(stream)
        group.is_launched = True

    def _land(self, group: _Group) -> Landed:
        if group.copies[0].out:
            for copy in group.copies:
                if self._leaving.get(copy.host) == copy.tag:
                    del self._leaving[copy.host]
                    if group.ok:
                        self.host.tags[copy.host] = copy.tag
        seconds = group.begin.elapsed_time(group.end) / 1000
        self._spare += (group.begin, group.end)
        link = self._directions[group.copies[0].out].link
        return Landed(group.copies, group.ok, max(seconds, link.duration(len(group.copies) * self._image)))

    def _refuse(self, copies: list[Copy], why: str) -> None:
        self._refused += copies
        self._report(copies, why)

    def _report(self, copies: Sequence[Copy], why: str) -> None:
        now = time.monotonic()
        if now - self._last_log >= LOG_INTERVAL:
            self._last_log = now
            _log.warning("copy of %d blocks failed, first %s: %s", len(copies), copies[0], why)

    def _event(self) -> torch.cuda.Event:
        if self._spare:
            return self._spare.pop()
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
