"""Who holds which KV block. Pure: block ids and counts, no memory.

At any time each block is in exactly one set (`check` proves it):

    free        holds nothing
    cached      holds KV that the prefix index can find, nobody references it; evicted in LRU order
    referenced  held by one or more requests

    allocate: free (or the oldest cached) -> referenced        share:   cached -> referenced, or one reference more
    release:  one reference less; the last one -> cached if the index knows the block, else free
"""

from collections import OrderedDict
from collections.abc import Iterable

from engine_core.prefix_index import PrefixIndex


class BlockPool:
    """The device pool's book-keeping. `release` is the only way to give a block back."""

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self._index = index
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self.evictions = 0

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that only the prefix index knows."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out."""
        return len(self._free) + len(self._cached)

    def is_referenced(self, block: int) -> bool:
        """Whether any request holds the block."""
        return self._references[block] > 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting the least recently used cached ones. The caller checks `available`."""
        assert count <= self.available, "allocate() without checking available"
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _none = self._cached.popitem(last=False)
                self._index.forget(block)
                self.evictions += 1
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block of a request's table, given in the table's order.

        The tail goes first into the LRU order, so that a chain is evicted from its end.
        """
        for block in reversed(list(blocks)):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._index:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Prove the invariants against the block tables of all requests, by block id. Raises AssertionError."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
        assert expected == self._references, "reference counts differ from the block tables"
        free, cached = set(self._free), set(self._cached)
        referenced = {block for block, count in enumerate(expected) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(cached) + len(referenced) == self.num_blocks, "a block is lost, or in two sets"
        assert free | cached | referenced == set(range(self.num_blocks)), "a block is in two sets"
        assert all(block in self._index for block in cached), "a cached block that can't be found"
        assert not any(block in self._index for block in free), "a free block that can be found"
