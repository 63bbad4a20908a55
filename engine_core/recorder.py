"""Writes down what the scheduler is told and a hash of what it decides, for tools/replay.py. `--record FILE`.

A record is msgpack frames, each after its length (4 bytes, little-endian): a `Header`, then events in order. It holds
the prompts' and the answers' token ids.
"""

import logging
import struct
import threading
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from engine_core.capacity import Capacity
from engine_core.plan import Copy, Landed, StepPlan, StepResult
from engine_core.request import Request
from engine_core.scheduler import Outcome, Scheduler
from engine_core.swap import SwapPolicy
from protocol.errors import StartupError
from protocol.messages import SamplingParams, pack_i32

VERSION = 1
FLUSH_SECONDS = 1.0
MAX_BACKLOG = 64 << 20  # bytes; a disk that is so far behind ends the recording
LENGTH = struct.Struct("<I")

_log = logging.getLogger("pagetide.core")


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One frame."""


class Header(Event, frozen=True):
    """Everything the scheduler is made from."""

    version: int
    capacity: Capacity
    eos_token_ids: list[int]
    policy: SwapPolicy


class Added(Event, frozen=True):
    """A request, as far as it decides anything. Token ids are int32 bytes."""

    id: int
    prompt: bytes
    output: bytes
    sampling: SamplingParams
    max_tokens: int
    arrival: float
    priority: int
    cache_salt: str


class Aborted(Event, frozen=True):
    """An abort of a request that there was, or with `is_spoilt` a discard."""

    id: int
    is_spoilt: bool = False


class Grown(Event, frozen=True):
    """The host pool's size."""

    host_blocks: int


class CopiesLanded(Event, frozen=True):
    """`Landed`."""

    copies: list[Copy]
    ok: bool
    seconds: float
    now: float


class Planned(Event, frozen=True):
    """A call of schedule, and what it gave; without a plan `step` is -1."""

    now: float
    step: int
    rows: int
    tokens: int
    copies: int
    digest: bytes  # of this plan and all before it


class Committed(Event, frozen=True):
    """What a step sampled: int32 bytes."""

    step: int
    tokens: bytes
    now: float
    seconds: float


class Recorder:
    """A file that a thread appends to. A write that fails ends the recording with a warning, and nothing else."""

    def __init__(self, path: Path) -> None:
        """Raises StartupError if the file can't be opened."""
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise StartupError(f"can't record to {path}: {error.strerror}") from error
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # held to exchange the buffer, not to write it
        self._buffer = bytearray()
        self._closing = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Append an event, soon."""
        if self._failed:
            return
        frame = self._encoder.encode(event)
        with self._lock:
            self._buffer += LENGTH.pack(len(frame)) + frame
            if len(self._buffer) > MAX_BACKLOG:
                self._fail("the disk is too slow")

    def close(self) -> None:
        """Write the rest."""
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        with self._file:
            while not (self._failed or self._flush()):
                pass

    def _flush(self) -> bool:
        """Wait for more and write it; whether that was the end."""
        is_last = self._closing.wait(FLUSH_SECONDS)
        with self._lock:
            data, self._buffer = self._buffer, bytearray()
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._fail(str(error))
        return is_last

    def _fail(self, why: str) -> None:
        self._failed = True
        self._buffer = bytearray()
        _log.warning("recording has ended, the engine goes on: %s", why)


class PlanHash:
    """A running hash of decisions."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)

    def add(self, plan: StepPlan | None) -> bytes:
        """Take in a plan; the digest of all so far."""
        if plan is not None:
            rows = (*plan.decodes, *plan.prefills)
            numbers = array("q", (plan.step, len(plan.decodes), len(plan.prefills), len(plan.copies)))
            for row in rows:
                numbers.extend((row.request_id, row.start, len(row.tokens), row.samples, len(row.blocks)))
                numbers.extend(row.blocks)
            for copy in plan.copies:
                numbers.extend((copy.device, copy.host, copy.tag, copy.out))
            self._hash.update(numbers.tobytes())
        return self._hash.digest()


class RecordingScheduler(Scheduler):
    """A scheduler that writes its inputs down as they come."""

    def __init__(
        self, recorder: Recorder, capacity: Capacity, eos_token_ids: Sequence[int], policy: SwapPolicy | None = None
    ) -> None:
        super().__init__(capacity, eos_token_ids, policy)
        self._write, self._hash = recorder.write, PlanHash()
        self._write(Header(VERSION, capacity, list(eos_token_ids), self.policy))

    def add(self, request: Request) -> None:
        """See `Scheduler`."""
        self._write(
            Added(
                request.id,
                pack_i32(request.prompt),
                pack_i32(request.output),
                request.sampling,
                request.max_tokens,
                request.arrival,
                request.priority,
                request.cache_salt,
            )
        )
        super().add(request)

    def abort(self, request_id: int) -> Request | None:
        """See `Scheduler`."""
        request = super().abort(request_id)
        if request is not None:
            self._write(Aborted(request_id))
        return request

    def discard(self, request_id: int) -> Request | None:
        """See `Scheduler`."""
        request = super().discard(request_id)
        if request is not None:
            self._write(Aborted(request_id, True))
        return request

    def grow_host(self, host_blocks: int) -> None:
        """See `Scheduler`."""
        self._write(Grown(host_blocks))
        super().grow_host(host_blocks)

    def land(self, landed: Landed, now: float) -> None:
        """See `Scheduler`."""
        self._write(CopiesLanded(list(landed.copies), landed.ok, landed.seconds, now))
        super().land(landed, now)

    def schedule(self, now: float) -> StepPlan | None:
        """See `Scheduler`."""
        plan = super().schedule(now)
        self._write(planned(now, plan, self._hash))
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float, seconds: float = 0.0) -> list[Outcome]:
        """See `Scheduler`."""
        self._write(Committed(plan.step, pack_i32(result.tokens), now, seconds))
        return super().commit(plan, result, now, seconds)


def planned(now: float, plan: StepPlan | None, hash_of_plans: PlanHash) -> Planned:
    """The event of a call of schedule."""
    digest = hash_of_plans.add(plan)
    if plan is None:
        return Planned(now, -1, 0, 0, 0, digest)
    rows = len(plan.decodes) + len(plan.prefills)
    return Planned(now, plan.step, rows, plan.num_tokens, len(plan.copies), digest)
