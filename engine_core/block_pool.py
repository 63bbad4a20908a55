"""Where every KV block is, in two pools, and who needs it. Pure: places and counts, no memory.

A `Block` (request.py) has a place in the device pool, in the host pool, in both, or in neither: then its KV is lost. A
full block never changes, so a copy of it stays good, and giving up one of two places costs nothing.

At any time each place of the device pool is in exactly one set, and so is each of the host pool (`check` proves it):

    device   free, cached (nobody holds its block, which can still be found or claimed), referenced (held), moving
    host     free, cached (a copy that nobody counts on), referenced (a swapped request claims its block), moving

A place is moving while a copy from or to it is in flight. It is then neither freed nor given to another block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine_core.plan import Copy
from engine_core.prefix_index import PrefixIndex
from engine_core.request import NOWHERE, Block, Motion


class BlockPool:
    """The book-keeping of both pools. Blocks are held (by running requests) and claimed (by swapped ones)."""

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        """`num_blocks` is the device pool's size; the host pool starts empty and grows (`grow_host`)."""
        self.num_blocks = num_blocks
        self.host_blocks = 0
        self.copies: list[Copy] = []  # to be started
        self.evictions = self.strays = 0
        self._index = index
        self._tags = 0
        self._moving: dict[int, Block] = {}  # by tag
        self._free = list(range(num_blocks - 1, -1, -1))
        self._host_free: list[int] = []
        # Cached blocks, least recently used first. Droppable ones may be overwritten at once, unsaved ones are worth a
        # copy to the host pool before.
        self._droppable: OrderedDict[Block, None] = OrderedDict()
        self._unsaved: OrderedDict[Block, None] = OrderedDict()
        self._host_cached: OrderedDict[Block, None] = OrderedDict()
        self.coming = 0  # device places whose blocks nobody holds any more and that are on their way out

    @property
    def free(self) -> int:
        """Device places that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Device places whose blocks nobody holds, and that can still be found or claimed."""
        return len(self._droppable) + len(self._unsaved)

    @property
    def available(self) -> int:
        """Device places that `allocate` could hand out."""
        return len(self._free) + len(self._droppable)

    @property
    def moving(self) -> int:
        """Blocks with a copy in flight."""
        return len(self._moving)

    @property
    def host_room(self) -> int:
        """Host places that `save` could take."""
        return len(self._host_free) + len(self._host_cached)

    def host_cost(self, blocks: Iterable[Block]) -> int:
        """How many places of `host_room` claiming blocks takes, and saving those that nobody else holds."""
        return sum(b.holders == 1 if b.host == NOWHERE else b in self._host_cached for b in blocks)

    @property
    def host_used(self) -> int:
        """Host places that hold an image, or wait for one."""
        return self.host_blocks - len(self._host_free)

    def grow_host(self, host_blocks: int) -> None:
        """The host pool has become so large."""
        self._host_free[:0] = range(host_blocks - 1, self.host_blocks - 1, -1)  # places go out in ascending order
        self.host_blocks = max(self.host_blocks, host_blocks)

    # -- running requests ----------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[Block]:
        """Take `count` blocks that hold nothing yet. The caller checks `available`."""
        assert count <= self.available, "allocate() without checking available"
        return [Block(device=self._take_place(), holders=1) for _ in range(count)]

    def places_for(self, blocks: Iterable[Block]) -> int:
        """How many available places `hold` would use up."""
        droppable = self._droppable
        return sum([block.device == NOWHERE or block in droppable for block in blocks])  # a list: it is asked often

    def hold(self, blocks: Sequence[Block]) -> None:
        """Add a holder to each block. Those that are in the host pool only begin to arrive."""
        for block in blocks:
            if block.device != NOWHERE:
                if not block.holders:
                    self._droppable.pop(block, None)
                    self._unsaved.pop(block, None)
                    self.coming -= block.motion is Motion.LEAVING
                block.holders += 1
        for block in blocks:
            if block.device == NOWHERE:
                block.device, block.holders = self._take_place(), 1
                self._start(block, Motion.ARRIVING)

    def release(self, blocks: Iterable[Block], is_droppable: bool = False) -> None:
        """Drop one holder of each block of a request's table, given in the table's order.

        The tail goes first into the LRU order, so that a chain is evicted from its end. What `is_droppable` isn't worth
        a copy to the host pool, unless a swapped request counts on it.
        """
        for block in reversed(list(blocks)):
            assert block.holders > 0, f"block at {block.device} released twice"
            block.holders -= 1
            if not block.holders:
                self.coming += block.motion is Motion.LEAVING
                self._settle(block, is_droppable and not block.claims)

    def spoil(self, block: Block) -> None:
        """Give up a block's image in the host pool, if there is one: it is about to be written, say."""
        if block.host != NOWHERE:
            self._host_cached.pop(block, None)
            self._host_free.append(block.host)
            block.host = NOWHERE

    # -- swapped requests ----------------------------------------------------------------------------------------

    def claim(self, blocks: Iterable[Block]) -> None:
        """Count on blocks, in whichever pool they are: a swapped request wants them back."""
        for block in blocks:
            self._host_cached.pop(block, None)
            block.claims += 1

    def unclaim(self, blocks: Iterable[Block]) -> None:
        """Drop one claim on each block of a request's table, in the table's order."""
        for block in reversed(list(blocks)):
            assert block.claims > 0, "a block was unclaimed twice"
            block.claims -= 1
            if not block.claims:
                self._settle(block)

    def save(self, blocks: Iterable[Block]) -> None:
        """Begin to copy blocks out to the host pool. The caller checks `host_room`."""
        for block in blocks:
            self._droppable.pop(block, None)
            self._unsaved.pop(block, None)
            block.host = self._take_host_place()
            self._tags += 1
            block.tag = self._tags
            self.coming += not block.holders
            self._start(block, Motion.LEAVING)

    def save_cached(self, count: int, spared: Sequence[Block] = ()) -> int:
        """Make the oldest `count` unsaved blocks droppable, by copies where there is room; how many there were.

        Room for a request isn't made of its own blocks as long as there are others: they are `spared`.
        """
        count = max(0, min(count, len(self._unsaved)))
        for block in reversed(spared if count else ()):
            if block in self._unsaved:
                self._unsaved.move_to_end(block)
        for _ in range(count):
            block = next(iter(self._unsaved))
            if self.host_room:
                self.save([block])
            else:
                del self._unsaved[block]
                self._droppable[block] = None
        return count

    def landed(self, copy: Copy, ok: bool) -> Block | None:
        """A copy has ended: the block it was of, or None if it wasn't waited for. A failed copy in breaks its block."""
        block = self._moving.get(copy.tag)
        if block is None or (block.device, block.host) != (copy.device, copy.host):
            self.strays += 1
            return None
        del self._moving[copy.tag]
        self.coming -= block.motion is Motion.LEAVING and not block.holders
        block.is_broken = not ok and block.motion is Motion.ARRIVING
        block.motion = Motion.STILL
        if not ok:
            self._host_free.append(block.host)
            block.host = NOWHERE
        if block.is_broken:
            self._index.forget(block)
        self._settle(block, not ok)
        return block

    # -- inside --------------------------------------------------------------------------------------------------

    def _start(self, block: Block, motion: Motion) -> None:
        block.motion = motion
        self._host_cached.pop(block, None)
        self._moving[block.tag] = block
        self.copies.append(Copy(block.device, block.host, block.tag, motion is Motion.LEAVING))

    def _take_place(self) -> int:
        if self._free:
            return self._free.pop()
        block, _none = self._droppable.popitem(last=False)
        place, block.device = block.device, NOWHERE
        self.evictions += 1
        if block.host == NOWHERE:
            self._index.forget(block)
        return place

    def _take_host_place(self) -> int:
        if self._host_free:
            return self._host_free.pop()
        block, _none = self._host_cached.popitem(last=False)
        place, block.host = block.host, NOWHERE
        if block.device == NOWHERE:
            self._index.forget(block)
        return place

    def _settle(self, block: Block, is_droppable: bool = False) -> None:
        """Put a block that was let go of, or has landed, into the sets where it belongs now."""
        if block.motion is not Motion.STILL:
            return
        wanted = bool(block.digest or block.claims) and not block.is_broken
        if block.device != NOWHERE and not block.holders:
            if not wanted:
                self._droppable.pop(block, None)
                self._unsaved.pop(block, None)
                self._free.append(block.device)
                block.device = NOWHERE
            elif is_droppable or block.host != NOWHERE or not self.host_blocks:
                self._droppable[block] = None
            elif block not in self._droppable:
                self._unsaved[block] = None
        if block.host != NOWHERE and not block.claims:
            if block.holders or wanted:
                self._host_cached[block] = None
            else:
                self.spoil(block)

    def check(self, tables: Iterable[Sequence[Block]], claimed: Iterable[Sequence[Block]]) -> None:
        """Prove the invariants against the tables of running and of swapped requests. Raises AssertionError."""
        held, claims = _count(tables), _count(claimed)
        blocks = {*held, *claims, *self._droppable, *self._unsaved, *self._host_cached, *self._moving.values()}
        for block in blocks:
            assert block.holders == held.get(block, 0), "holders differ from the tables of running requests"
            assert block.claims == claims.get(block, 0), "claims differ from the tables of swapped requests"
            assert (block.motion is not Motion.STILL) == (self._moving.get(block.tag) is block), "a copy is not counted"
            assert not block.digest or self._index.find(block.digest) is block, "a digest finds another block"
        on_device = [block for block in blocks if block.device != NOWHERE]
        on_host = [block for block in blocks if block.host != NOWHERE]
        _check_partition(self._free + [block.device for block in on_device], self.num_blocks)
        _check_partition(self._host_free + [block.host for block in on_host], self.host_blocks)
        for block in on_device:
            is_cached = not block.holders and block.motion is Motion.STILL
            assert is_cached == ((block in self._droppable) + (block in self._unsaved) == 1), "cached, or in use?"
            assert not is_cached or block.digest or block.claims, "cached, and nobody can ever use it"
        for block in on_host:
            is_cached = not block.claims and block.motion is Motion.STILL
            assert is_cached == (block in self._host_cached), "a host copy is cached, or counted on?"
        coming = sum(block.motion is Motion.LEAVING and not block.holders for block in blocks)
        assert coming == self.coming, "places on their way out are miscounted"


def _count(tables: Iterable[Sequence[Block]]) -> dict[Block, int]:
    counts: dict[Block, int] = {}
    for table in tables:
        for block in table:
            counts[block] = counts.get(block, 0) + 1
    return counts


def _check_partition(places: list[int], size: int) -> None:
    assert len(places) == len(set(places)), "a place is used twice"
    assert set(places) == set(range(size)), "a place is lost"
