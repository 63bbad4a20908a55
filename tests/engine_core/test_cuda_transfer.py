"""Copies on copy streams: byte equality under load, order against slow kernels both ways, failures, pinning."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine_core import cuda_transfer as module
from engine_core import transfer
from engine_core.cuda_transfer import CudaTransfer
from engine_core.plan import Copy, Landed
from engine_core.transfer import HostPool
from kernels.compiler import KernelError

from .copies import back, copies_of, out

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
CUDA = torch.device("cuda")
IMAGE = 64 << 10


class Rig:
    """A transfer over pools of `blocks` images."""

    def __init__(
        self, blocks: int = 64, image: int = IMAGE, pinned: bool = True, slab_blocks: int = 16, limit: int = 0
    ) -> None:
        self.pool = torch.randint(0, 256, (blocks, image), dtype=torch.uint8, device=CUDA)
        self.host = HostPool(image, blocks * image, pinned, slab_blocks * image)
        assert self.host.made.wait(20)
        self.transfer = CudaTransfer(self.pool, self.host, bandwidth_limit=limit)

    def wait(self, copies: int) -> list[Landed]:
        """Until so many copies have landed."""
        landed: list[Landed] = []
        deadline = time.monotonic() + 10
        while sum(len(group.copies) for group in landed) < copies:
            assert time.monotonic() < deadline, "nothing landed"
            assert self.transfer.poll_interval > 0
            landed += self.transfer.landed()
        return landed

    def run(self, copies: list[Copy]) -> list[Landed]:
        self.transfer.start(copies)
        return self.wait(len(copies))

    def stored(self, host: int) -> Tensor:
        return torch.from_numpy(self.host.images(host, 1)[0].copy())


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: object) -> Rig:
        rigs.append(Rig(**options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.transfer.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_scattered_blocks_are_equal_byte_for_byte_both_ways_under_load(
    make_rig: Callable[..., Rig], pinned: bool
) -> None:
    """Half of the blocks go out while the other half come in to other places, and the compute stream is busy."""
    rig = make_rig(blocks=96, image=294_912, pinned=pinned)
    draw = random.Random(7)
    a = torch.randn(2048, 2048, device=CUDA)
    content = rig.pool.cpu()  # by name: a block's first content
    where = list(range(96))  # name by place, of the device pool's first half
    rig.run([out(n, n, tag=1000 + n) for n in range(48, 96)])
    kept = {n: n for n in range(48, 96)}  # name by host place
    tag = 2000
    tags = {n: 1000 + n for n in range(48, 96)}
    for _ in range(12):
        leaving = draw.sample(range(96), 24)
        host_free = draw.sample([n for n in range(96) if n not in kept], 24)
        arriving = draw.sample(sorted(kept), 24)
        places = draw.sample([n for n in range(96) if n not in leaving], 24)
        copies = []
        for device, host in zip(leaving, host_free, strict=True):
            tag += 1
            copies.append(out(device, host, tag))
            kept[host], tags[host] = where[device], tag
        for device, host in zip(places, arriving, strict=True):
            copies.append(back(device, host, tags[host]))
            where[device] = kept.pop(host)
        draw.shuffle(copies)
        for _ in range(20):
            a @ a
        rig.transfer.start(copies)
        for _ in range(20):
            a @ a
        landed = rig.wait(48)
        assert copies_of(landed, ok=False) == []
        assert all(group.seconds > 0 for group in landed)
        for is_out in (True, False):
            assert [c for c in copies_of(landed) if c.out == is_out] == [c for c in copies if c.out == is_out]
    assert torch.equal(rig.pool.cpu(), content[where])
    for host, name in kept.items():
        assert torch.equal(rig.stored(host), content[name])


def test_a_copy_out_comes_after_a_slow_write_of_its_block(make_rig: Callable[..., Rig]) -> None:
    """1,000 rounds: each writes the block behind a slow kernel, in the step just before the copy."""
    rig = make_rig()
    for number in range(1000):
        block = number % 64
        torch.cuda._sleep(50_000)
        rig.pool[block].fill_(number % 251)
        assert copies_of(rig.run([out(block, 63 - block)]))
        assert (rig.host.images(63 - block, 1) == number % 251).all()


def test_a_copy_in_comes_after_a_slow_read_of_what_it_overwrites(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.pool.zero_()
    rig.pool[0].fill_(7)
    rig.run([out(0, 0, tag=5)])
    seen = torch.empty(200, IMAGE, dtype=torch.uint8, device=CUDA)
    for number in range(200):
        block = 1 + number % 60
        rig.pool[block].zero_()
        torch.cuda._sleep(100_000)
        seen[number].copy_(rig.pool[block])
        rig.run([back(block, 0, 5)])
        assert (rig.pool[block] == 7).all()
    assert (seen == 0).all()


def test_a_stream_that_is_not_the_current_one(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    steps = torch.cuda.Stream()
    mine = CudaTransfer(rig.pool, rig.host, steps)
    with torch.cuda.stream(steps):
        torch.cuda._sleep(20_000_000)
        rig.pool[3].fill_(9)
    mine.start([out(3, 3)])
    rig.transfer = mine
    rig.wait(1)
    assert (rig.stored(3) == 9).all()


def test_nothing_waits_for_a_copy(make_rig: Callable[..., Rig]) -> None:
    """Behind a kernel of about 100 ms, starting and asking take none of it; without copies nobody need ask."""
    rig = make_rig()
    rig.run([out(0, 0)])
    assert rig.transfer.poll_interval == 0
    torch.cuda._sleep(200_000_000)
    begun = time.perf_counter()
    rig.transfer.start([*(out(n, n) for n in range(1, 33)), back(40, 0, 100)])
    assert rig.transfer.landed() == []
    assert rig.transfer.poll_interval > 0
    assert time.perf_counter() - begun < 0.03
    assert 1 not in rig.host.tags
    rig.wait(33)
    assert rig.transfer.poll_interval == 0
    assert rig.host.tags[1] == 101


def test_a_large_batch_lands_in_groups(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(blocks=96, image=1 << 20)
    landed = rig.run([out(n, n) for n in range(96)])
    assert [len(group.copies) for group in landed] == [16] * 6


def test_adjacent_blocks_move_at_once(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(slab_blocks=8)
    seen: list[int] = []
    copy_async = module.copy_async

    def count(targets: list[int], sources: list[int], sizes: list[int], stream: int) -> None:
        seen.extend(size // IMAGE for size in sizes)
        copy_async(targets, sources, sizes, stream)

    monkeypatch.setattr(module, "copy_async", count)
    rig.run([*(out(n, n + 4) for n in range(8)), out(20, 13), out(21, 15)])
    assert seen == [4, 4, 1, 1]
    for device, host in [*((n, n + 4) for n in range(8)), (20, 13), (21, 15)]:
        assert torch.equal(rig.stored(host), rig.pool[device].cpu())


def test_old_drivers_copy_one_by_one(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels import cuda_copy

    monkeypatch.setattr(cuda_copy, "_batch", lambda: None)
    rig = make_rig()
    assert copies_of(rig.run([out(n, 63 - n) for n in range(0, 64, 3)]))
    assert torch.equal(rig.stored(60), rig.pool[3].cpu())


def test_stale_and_missing_blocks_are_refused_and_their_neighbours_are_not(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.run([out(0, 10, tag=1), out(1, 11, tag=2), out(2, 12, tag=3)])
    rig.run([out(5, 11, tag=9)])  # the host block has been given to somebody else
    bad = [back(21, 11, 2), back(23, 13, 4), out(64, 0), out(0, 64), out(-1, 0), back(1, -1, 1)]
    before = rig.pool.clone()
    landed = rig.run([back(20, 10, 1), *bad, back(22, 12, 3)])
    assert copies_of(landed) == [back(20, 10, 1), back(22, 12, 3)]
    assert {*copies_of(landed, ok=False)} == {*bad}
    before[20], before[22] = before[0], before[2]
    assert torch.equal(rig.pool, before)


def test_what_is_given_away_while_it_is_read_is_stale(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.run([out(0, 0, tag=1)])
    torch.cuda._sleep(50_000_000)
    rig.transfer.start([back(1, 0, 1)])
    rig.transfer.start([out(2, 0, tag=2)])
    landed = rig.wait(2)
    assert copies_of(landed) == [out(2, 0, tag=2)]
    assert copies_of(landed, ok=False) == [back(1, 0, 1)]


def test_a_copy_in_of_what_is_still_going_out(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(image=1 << 20)
    torch.cuda._sleep(20_000_000)
    rig.transfer.start([*(out(n, n) for n in range(20)), *(back(40 + n, n, 100 + n) for n in range(20))])
    assert copies_of(rig.wait(40), ok=False) == []
    assert torch.equal(rig.pool[40:60], rig.pool[:20])


def test_a_launch_that_fails_is_told_and_leaves_no_tag(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    rig.run([out(0, 0, tag=1)])

    def fail(*_: object) -> None:
        raise KernelError("a bad cable")

    with monkeypatch.context() as patch:
        patch.setattr(module, "copy_async", fail)
        assert copies_of(rig.run([out(1, 0, tag=2)]), ok=False) == [out(1, 0, tag=2)]
    assert copies_of(rig.run([back(2, 0, 1)]), ok=False) == [back(2, 0, 1)]
    assert copies_of(rig.run([out(9, 9)])) == [out(9, 9)]
    assert "a bad cable" in caplog.text


def test_a_slab_that_cannot_be_pinned_is_pageable_and_so_are_those_after_it(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pin, slabs = transfer._pin, iter(range(9))

    def first_only(slab: Tensor) -> None:
        if next(slabs):
            raise RuntimeError("out of memory")
        pin(slab)

    monkeypatch.setattr(transfer, "_pin", first_only)
    rig = make_rig()
    assert [torch.from_numpy(slab).is_pinned() for slab in rig.host._slabs] == [True, False, False, False]
    assert next(slabs) == 2
    (record,) = caplog.records
    assert "can't pin host memory (RAM, not GPU memory)" in record.getMessage()
    before = rig.pool.clone()
    assert copies_of(rig.run([out(n, 63 - n) for n in range(64)]))
    rig.pool.zero_()
    torch.cuda._sleep(200_000_000)
    begun = time.perf_counter()
    rig.transfer.start([back(n, 63 - n, 100 + n) for n in range(64)])
    assert time.perf_counter() - begun < 0.03, "the step loop waited for a pageable copy"
    assert copies_of(rig.wait(64), ok=False) == []
    assert torch.equal(rig.pool, before)


def test_a_slower_link(make_rig: Callable[..., Rig]) -> None:
    """32 MiB each way at 0.5 GB/s: 67 ms, in groups that land on the way."""
    rig = make_rig(blocks=64, image=1 << 20, limit=500_000_000)
    begun = time.perf_counter()
    rig.transfer.start([out(n, n) for n in range(32)])
    first = rig.wait(1)
    assert 0.033 <= time.perf_counter() - begun < 0.06
    rig.wait(16)
    assert 0.067 <= time.perf_counter() - begun < 0.12
    assert first[0].seconds == pytest.approx(16 * (1 << 20) / 500e6)


def test_memory_is_pinned_without_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a switch interval of a day only somebody who lets go of the GIL lets others run."""
    progress, seen = 0, []
    ending = threading.Event()

    def spin() -> None:
        nonlocal progress
        while not ending.is_set():
            progress += 1
            time.sleep(1e-6)

    pin = transfer._pin

    def measured(slab: Tensor) -> None:
        before = progress
        pin(slab)
        seen.append(progress - before)

    monkeypatch.setattr(transfer, "_pin", measured)
    interval, spinner = sys.getswitchinterval(), threading.Thread(target=spin)
    try:
        sys.setswitchinterval(86400)
        spinner.start()
        host = HostPool(1 << 20, 512 << 20, pinned=True)
        assert host.made.wait(20)
    finally:
        ending.set()
        sys.setswitchinterval(interval)
        spinner.join()
    assert host.pinned
    assert max(seen) > 20
    host.close()
