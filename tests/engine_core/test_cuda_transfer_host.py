"""The host's side of copies on copy streams, without a GPU: streams here are lists of what they are still to do."""

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from engine_core import cuda_transfer as module
from engine_core import transfer
from engine_core.cuda_transfer import POLL_INTERVAL, CudaTransfer
from engine_core.plan import Copy, Landed
from engine_core.transfer import HostPool
from kernels.compiler import KernelError

IMAGE = 1 << 20


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.passed = False

    def record(self, stream: "FakeStream") -> None:
        self.passed = False
        stream.work.append(lambda: setattr(self, "passed", True))

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.passed and end.passed
        return 2.0


class FakeStream:
    all: list["FakeStream"] = []

    def __init__(self, device: object = None) -> None:
        self.cuda_stream = len(FakeStream.all)
        self.work: deque[Callable[[], object]] = deque()
        self.waits: list[object] = []
        FakeStream.all.append(self)

    def wait_event(self, event: FakeEvent) -> None:
        self.waits.append(event)

    def wait_stream(self, stream: "FakeStream") -> None:
        self.waits.append(stream)

    def synchronize(self) -> None:
        self.run()

    def run(self, count: int = 1 << 20) -> None:
        for _ in range(min(count, len(self.work))):
            self.work.popleft()()


def fake_copies(targets: list[int], sources: list[int], sizes: list[int], stream: int) -> None:
    for target, source, size in zip(targets, sources, sizes, strict=True):
        FakeStream.all[stream].work.append(lambda t=target, s=source, n=size: ctypes.memmove(t, s, n))


class Rig:
    def __init__(self, **options: int) -> None:
        self.pool = torch.randint(0, 256, (40, IMAGE), dtype=torch.uint8)
        self.host = HostPool(IMAGE, 40 * IMAGE, slab_bytes=10 * IMAGE)
        assert self.host.made.wait(10)
        self.host.pinned = True
        self.steps = FakeStream()
        self.transfer = CudaTransfer(self.pool, self.host, self.steps, **options)  # type: ignore[arg-type]
        self.out, self.back = (self.transfer._directions[out].stream for out in (True, False))

    def run(self, copies: list[Copy]) -> list[Landed]:
        self.transfer.start(copies)
        self.out.run()  # type: ignore[attr-defined]
        self.back.run()  # type: ignore[attr-defined]
        return self.transfer.landed()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    FakeStream.all = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(module, "copy_async", fake_copies)
    return Rig()


def out(device: int, host: int) -> Copy:
    return Copy(device, host, 100 + device, out=True)


def back(device: int, host: int, tag: int) -> Copy:
    return Copy(device, host, tag, out=False)


def of(landed: list[Landed], ok: bool = True) -> list[Copy]:
    return [copy for group in landed if group.ok == ok for copy in group.copies]


def test_images_go_out_and_come_back(rig: Rig) -> None:
    before = rig.pool.clone()
    pairs = [*((n, n + 5) for n in range(10)), (30, 1), (20, 39), (21, 38)]
    copies = [out(device, host) for device, host in pairs]
    assert of(rig.run(copies)) == copies
    rig.pool.zero_()
    copies = [back(39 - device, host, 100 + device) for device, host in pairs]
    assert of(rig.run(copies)) == copies
    for device, _ in pairs:
        assert torch.equal(rig.pool[39 - device], before[device])


def test_both_directions_start_behind_the_steps(rig: Rig) -> None:
    """F3: the compute stream's event is recorded at the start, and both copy streams wait for it."""
    rig.run([out(0, 0)])
    rig.out.waits.clear()  # type: ignore[attr-defined]
    rig.steps.work.clear()
    rig.transfer.start([out(1, 1), back(2, 0, 100)])
    assert len(rig.steps.work) == 1
    assert rig.out.waits == rig.back.waits == [rig.transfer._started]  # type: ignore[attr-defined]


def test_what_has_ended_lands_once_in_order_and_is_stored_then(rig: Rig) -> None:
    copies = [out(n, n) for n in range(40)]
    assert rig.transfer.poll_interval == 0
    rig.transfer.start(copies)
    assert rig.transfer.landed() == []
    assert rig.transfer.poll_interval == POLL_INTERVAL
    rig.out.run(3 + 5)  # type: ignore[attr-defined]
    (first,) = rig.transfer.landed()
    assert (first.copies, first.ok, first.seconds) == (copies[:16], True, 0.002)
    assert set(rig.host.tags) == set(range(16))
    rig.out.run()  # type: ignore[attr-defined]
    assert of(rig.transfer.landed()) == copies[16:]
    assert rig.transfer.landed() == []
    assert rig.transfer.poll_interval == 0


def test_stale_missing_and_failed_copies(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.run([out(0, 10), out(1, 11)])
    rig.run([out(5, 11)])
    bad = [back(20, 11, 101), back(21, 13, 4), out(40, 0), out(0, 40), out(-1, 0), back(2, -1, 1)]
    landed = rig.run([back(22, 10, 100), *bad])
    assert of(landed) == [back(22, 10, 100)]
    assert {*of(landed, ok=False)} == {*bad}

    def fail(*_: object) -> None:
        raise KernelError("a bad cable")

    with monkeypatch.context() as patch:
        patch.setattr(module, "copy_async", fail)
        assert of(rig.run([out(7, 10)]), ok=False) == [out(7, 10)]
    assert of(rig.run([back(22, 10, 100)]), ok=False) == [back(22, 10, 100)], "half-written bytes are taken for good"


def test_a_host_block_given_away_in_mid_copy(rig: Rig) -> None:
    rig.run([out(0, 0)])
    rig.transfer.start([back(1, 0, 100)])
    rig.transfer.start([out(2, 0)])
    rig.back.run()  # type: ignore[attr-defined]
    assert of(rig.transfer.landed(), ok=False) == [back(1, 0, 100)]


def test_a_copy_in_of_what_is_still_going_out_waits_for_it(rig: Rig) -> None:
    rig.transfer.start([out(0, 0)])
    rig.transfer.start([back(1, 0, 100)])
    assert rig.out in rig.back.waits  # type: ignore[attr-defined]
    rig.out.run()  # type: ignore[attr-defined]
    rig.back.run()  # type: ignore[attr-defined]
    assert of(rig.transfer.landed()) == [out(0, 0), back(1, 0, 100)]
    assert torch.equal(rig.pool[1], rig.pool[0])


def test_a_slower_link_holds_landings_back(rig: Rig) -> None:
    """16 MiB in ten seconds: not now."""
    slow = Rig(bandwidth_limit=16 * IMAGE // 10)
    assert slow.run([out(n, n) for n in range(16)]) == []
    assert slow.transfer.poll_interval > 0
    quick = Rig(bandwidth_limit=1 << 50)
    assert len(of(quick.run([out(n, n) for n in range(16)]))) == 16


def test_a_pool_is_not_closed_while_its_first_slab_is_being_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, closed = threading.Event(), threading.Event(), threading.Event()

    def pin(slab: torch.Tensor) -> None:
        begun.set()
        assert may_end.wait(10)

    monkeypatch.setattr(transfer, "_pin", pin)
    unpinned: list[int] = []
    driver = SimpleNamespace(cudaHostUnregister=unpinned.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    host = HostPool(IMAGE, 4 * IMAGE, pinned=True, slab_bytes=IMAGE)
    assert begun.wait(10)
    closing = threading.Thread(target=lambda: (host.close(), closed.set()))
    closing.start()
    assert not closed.wait(0.05)
    may_end.set()
    closing.join(10)
    assert host.host_blocks == len(unpinned) == 1, "no slab follows"


def test_closing_waits_for_what_is_in_flight(rig: Rig) -> None:
    rig.transfer.start([out(0, 0)])
    rig.transfer.close()
    assert not rig.out.work  # type: ignore[attr-defined]
