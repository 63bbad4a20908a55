"""Copies between the pools: byte equality, order, independence, failures. Real threads, no timing."""

import logging
import mmap
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine_core import transfer as module
from engine_core.null_runner import NullTransfer
from engine_core.plan import Copy, Landed
from engine_core.transfer import CpuTransfer, HostPool, Link
from engine_core.waker import Waker
from kernels.kv_format import KVShape, block_layout, kv_codecs, resolve_kv_dtype

from .copies import back, copies_of, out

IMAGE = 4096


class Rig:
    """A transfer over pools of `blocks` images, whose landings can be waited for."""

    def __init__(
        self,
        blocks: int = 64,
        image: int = IMAGE,
        gate: Callable[[Copy], None] | None = None,
        slab_bytes: int = 1 << 20,
        host_blocks: int = 0,
        limit: int = 0,
    ) -> None:
        self.pool = torch.randint(0, 256, (blocks, image), dtype=torch.uint8)
        self.host = HostPool(image, (host_blocks or blocks) * image, slab_bytes=slab_bytes)
        assert self.host.made.wait(10)
        self._woken = threading.Semaphore(0)
        self.transfer = CpuTransfer(self.pool, self.host, self._woken.release, gate, limit)

    def wait(self, copies: int) -> list[Landed]:
        """Until so many copies have landed."""
        landed: list[Landed] = []
        while sum(len(group.copies) for group in landed) < copies:
            assert self._woken.acquire(timeout=10), "nothing landed"
            landed += self.transfer.landed()
        return landed

    def run(self, copies: list[Copy]) -> list[Landed]:
        self.transfer.start(copies)
        return self.wait(len(copies))


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: object) -> Rig:
        rigs.append(Rig(**options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.transfer.close()


@pytest.mark.parametrize("name", [codec.names[0] for codec in kv_codecs(torch.bfloat16)])
@pytest.mark.parametrize("wide", [(), (1,)])
def test_every_format_comes_back_byte_for_byte(name: str, wide: tuple[int, ...], make_rig: Callable[..., Rig]) -> None:
    """Scales included: they are part of the image. Blocks come back elsewhere, some adjacent, some not."""
    layout = block_layout(KVShape(3, 2, 64, 16), resolve_kv_dtype(name, torch.bfloat16), torch.bfloat16, wide)
    rig = make_rig(blocks=40, image=layout.image_bytes, slab_bytes=5 * layout.image_bytes)
    before = rig.pool.clone()
    sources = [*range(3, 17), 25, 21, 22, 39, 0]
    hosts = [*range(2, 16), 30, 31, 32, 0, 39]
    assert copies_of(rig.run([out(d, h) for d, h in zip(sources, hosts, strict=True)]))
    assert torch.equal(rig.pool, before)
    rig.pool.fill_(0xFF)
    targets = sources[::-1]
    copies = [back(t, h, 100 + s) for s, h, t in zip(sources, hosts, targets, strict=True)]
    assert copies_of(rig.run(copies)) == copies
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(rig.pool[target], before[source])
    untouched = sorted(set(range(40)) - set(sources))
    assert (rig.pool[untouched] == 0xFF).all()


def test_a_direction_lands_in_order_and_a_large_batch_in_groups(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(blocks=100)
    copies = [out(n, n) for n in range(100)]
    landed = rig.run(copies)
    assert copies_of(landed) == copies
    assert [len(group.copies) for group in landed] == [32, 32, 32, 4]
    assert all(group.seconds > 0 for group in landed)


def test_a_slower_link_makes_copies_land_later(make_rig: Callable[..., Rig]) -> None:
    """40 blocks of 64 KiB at 20 MB/s: groups of 32 and 8 land after 105 and 131 ms, each way by itself."""
    rig = make_rig(image=64 << 10, limit=20_000_000)
    started = time.monotonic()
    landed = rig.run([out(n, n) for n in range(40)])
    assert time.monotonic() - started >= 0.131
    assert [group.seconds for group in landed] == pytest.approx([0.105, 0.026], rel=0.1, abs=0.02)
    assert rig.run([back(50, 0, 100)])[0].seconds < 0.02


def test_a_link_carries_one_thing_after_the_other() -> None:
    link = Link(1000)
    assert [link.arrival(*sent) for sent in ((500, 10.0), (500, 10.2), (1000, 20.0))] == [10.5, 11.0, 21.0]
    assert Link(0).arrival(1 << 30, 3.0) == 3.0


def test_groups_of_large_images_are_small(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(blocks=4, image=9 << 20)
    assert [len(group.copies) for group in rig.run([out(n, n) for n in range(4)])] == [1] * 4


def test_the_directions_are_independent(make_rig: Callable[..., Rig]) -> None:
    """A copy that is held back holds those behind it, and none of the other direction."""
    held = threading.Event()
    reached = threading.Event()

    def gate(copy: Copy) -> None:
        if copy.out and copy.device == 5:
            reached.set()
            assert held.wait(10)

    rig = make_rig(gate=gate)
    rig.run([out(1, 1), out(2, 2)])
    rig.transfer.start([out(4, 4), out(5, 5), out(6, 6), back(11, 1, 101), back(12, 2, 102)])
    assert reached.wait(10)
    assert {copy.device for copy in copies_of(rig.wait(3))} == {4, 11, 12}
    assert rig.transfer.landed() == []
    assert 5 not in rig.host.tags
    held.set()
    assert [copy.device for copy in copies_of(rig.wait(2))] == [5, 6]
    assert torch.equal(rig.pool[11], rig.pool[1])


def test_a_copy_that_raises_fails_alone(make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    def gate(copy: Copy) -> None:
        if copy.device == 2:
            raise OSError("a bad cable")

    rig = make_rig(gate=gate)
    landed = rig.run([out(n, n) for n in range(5)])
    assert [copy.device for copy in copies_of(landed)] == [0, 1, 3, 4]
    assert [copy.device for copy in copies_of(landed, ok=False)] == [2]
    assert copies_of(rig.run([out(9, 9)])) == [out(9, 9)]
    assert "a bad cable" in caplog.text


@pytest.mark.parametrize("copy", [out(64, 0), out(0, 64), out(-1, 0), out(0, -1), out(63, 65)])
def test_blocks_that_are_not_there_are_not_copied(copy: Copy, make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    before = rig.pool.clone()
    assert copies_of(rig.run([copy, out(7, 7)]), ok=False) == [copy]
    assert torch.equal(rig.pool, before)
    assert torch.equal(torch.from_numpy(rig.host.images(7, 1)[0].copy()), before[7])


def test_a_stale_copy_is_refused_and_its_neighbours_are_not(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.run([out(0, 10, tag=1), out(1, 11, tag=2), out(2, 12, tag=3)])
    rig.run([out(5, 11, tag=9)])  # the host block has been given to somebody else
    landed = rig.run([back(20, 10, 1), back(21, 11, 2), back(22, 12, 3), back(23, 13, 4)])
    assert copies_of(landed) == [back(20, 10, 1), back(22, 12, 3)]
    assert copies_of(landed, ok=False) == [back(21, 11, 2), back(23, 13, 4)]


def test_what_is_overwritten_while_it_is_read_is_stale(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    rig.run([out(0, 0, tag=1)])
    copyto = module.np.copyto

    def overtaken(target: object, source: object) -> None:
        copyto(target, source)  # type: ignore[call-overload]
        rig.host.tags.pop(0)

    monkeypatch.setattr(module.np, "copyto", overtaken)
    assert copies_of(rig.run([back(1, 0, 1)]), ok=False) == [back(1, 0, 1)]


def test_a_failed_copy_out_leaves_no_tag(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else half of its bytes would be taken for what was there before."""
    rig = make_rig()
    rig.run([out(0, 0, tag=1)])

    def fail(target: object, source: object) -> None:
        raise RuntimeError("half-way")

    with monkeypatch.context() as patch:
        patch.setattr(module.np, "copyto", fail)
        assert copies_of(rig.run([out(1, 0, tag=2)]), ok=False) == [out(1, 0, tag=2)]
    assert copies_of(rig.run([back(2, 0, 1)]), ok=False) == [back(2, 0, 1)]


def test_adjacent_blocks_move_at_once(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(slab_bytes=8 * IMAGE)
    sizes = []
    copyto = module.np.copyto

    def count(target: Tensor, source: Tensor) -> None:
        sizes.append(len(source))
        copyto(target, source)  # type: ignore[call-overload]

    monkeypatch.setattr(module.np, "copyto", count)
    rig.run([*(out(n, n + 4) for n in range(8)), out(20, 13), out(21, 15)])
    assert sizes == [4, 4, 1, 1]  # a slab of the host pool ends after its block 7


def test_bytes_move_without_the_gil(make_rig: Callable[..., Rig]) -> None:
    """With a switch interval of a day only somebody who lets go of the GIL lets others run."""
    progress = 0
    seen: list[int] = []
    ending = threading.Event()

    def spin() -> None:
        nonlocal progress
        while not ending.is_set():
            progress += 1
            time.sleep(1e-6)  # lets go of the GIL

    rig = make_rig(blocks=2, image=64 << 20, slab_bytes=64 << 20)
    copyto = module.np.copyto

    def measured(target: object, source: object) -> None:
        before = progress
        copyto(target, source)  # type: ignore[call-overload]
        seen.append(progress - before)

    interval = sys.getswitchinterval()
    spinner = threading.Thread(target=spin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.np, "copyto", measured)
        try:
            sys.setswitchinterval(86400)
            spinner.start()
            for _ in range(20):  # on a busy machine the spinner may miss a copy
                rig.run([out(0, 0)])
                if seen[-1]:
                    break
        finally:
            ending.set()
            sys.setswitchinterval(interval)
            spinner.join()
    assert seen[-1] > 0


def test_close_ends_the_threads_in_mid_copy() -> None:
    """What is in flight and what waits is lost; the thread that is held ends as soon as it can."""
    held, reached = threading.Event(), threading.Event()

    def gate(copy: Copy) -> None:
        reached.set()
        assert held.wait(10)

    rig = Rig(gate=gate)
    rig.transfer.start([out(n, n) for n in range(30)])
    assert reached.wait(10)
    held.set()
    rig.transfer.close()
    assert not any(thread.is_alive() for thread in rig.transfer._threads)
    assert len(rig.host.tags) < 30
    rig.transfer.start([out(0, 0)])  # too late, and harmless


def test_the_budget_is_kept_in_whole_images() -> None:
    host = HostPool(1000, 10_999, slab_bytes=3_500)
    assert host.made.wait(10)
    assert host.host_blocks == host.max_blocks == 10
    assert [len(slab) for slab in host._slabs] == [3, 3, 3, 1]
    host.images(9, 1)[:] = 1
    assert host.addresses == [host.images(block, 1).ctypes.data for block in range(10)]
    with pytest.raises(IndexError):
        host.images(10, 1)


def test_what_is_there_stays_usable_when_memory_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allocate = module._allocate
    slabs = iter(range(3))

    def two(host: HostPool, count: int) -> Tensor:
        if next(slabs) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return allocate(host, count)

    monkeypatch.setattr(module, "_allocate", two)
    rig = Rig(blocks=10, image=1 << 20, slab_bytes=2 << 20)
    assert rig.host.host_blocks == 4
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "ends at 4 of 10 MiB (this is RAM, not GPU memory)" in record.getMessage()
    assert copies_of(rig.run([out(0, 3)]))
    assert copies_of(rig.run([out(0, 4)]), ok=False)
    rig.transfer.close()


def test_no_more_than_half_of_the_free_memory_is_promised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "free_memory", lambda device: (10 << 20, 100 << 20))
    host = HostPool(1 << 20, 64 << 20, slab_bytes=2 << 20)
    assert host.made.wait(10)
    assert host.host_blocks == 4
    assert "5 MiB are half of the free RAM" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
def test_memory_that_cannot_be_pinned_is_pageable(caplog: pytest.LogCaptureFixture) -> None:
    host = HostPool(1000, 10_000, pinned=True, slab_bytes=2_000)
    assert host.made.wait(10)
    assert host.host_blocks == 10
    (record,) = caplog.records
    assert "can't pin host memory (RAM, not GPU memory)" in record.getMessage()


ENDING = """
import threading
from engine_core import transfer

begun = threading.Event()

def pin(slab):
    begun.set()
    threading.main_thread().join()  # the process is ending
    print("pinned", flush=True)

transfer._pin = pin
transfer.HostPool(1 << 10, 1 << 30, pinned=True, slab_bytes=1 << 10)
assert begun.wait(10)
"""


def test_a_process_ends_when_the_slab_that_is_being_pinned_is_and_no_later() -> None:
    """However it ends, and though nobody closes the pool."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "pinned\n"), done.stderr


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts pages as Linux does")
def test_slabs_take_no_memory_before_they_are_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    host = HostPool(1 << 20, 256 << 20)
    assert host.made.wait(10)
    assert host.host_blocks == 256
    assert resident() - before < 64 << 20


def test_a_transfer_learns_of_slabs_made_later(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.host.host_blocks = 7
    rig.transfer.landed()
    assert rig.transfer.host_blocks == 7


def test_the_null_transfer_lands_at_the_next_call_and_keeps_tags() -> None:
    wakes: list[None] = []
    null = NullTransfer(10, lambda: wakes.append(None))
    assert null.landed() == []
    null.start([])
    assert not wakes
    null.start([out(0, 1, tag=5)])
    null.start([out(1, 2, tag=6)])
    assert len(wakes) == 2
    assert [(group.ok, len(group.copies)) for group in null.landed()] == [(True, 2)]
    null.start([back(3, 1, 5), back(4, 2, 5), back(5, 9, 7)])
    assert {group.ok: group.copies for group in null.landed()} == {
        True: [back(3, 1, 5)],
        False: [back(4, 2, 5), back(5, 9, 7)],
    }
    assert null.landed() == []


def test_a_waker_wakes_a_poll_until_it_is_cleared() -> None:
    waker = Waker()
    poll = select.poll()
    poll.register(waker, select.POLLIN)
    assert poll.poll(0) == []
    waker.clear()
    waker.set()
    waker.set()
    assert poll.poll(0) == [(waker.fileno(), select.POLLIN)]
    waker.clear()
    assert poll.poll(0) == []
