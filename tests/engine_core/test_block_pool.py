"""Blocks are in one set at a time, in whatever order requests that share them end."""

from itertools import permutations

import pytest

from engine_core.block_pool import BlockPool
from engine_core.prefix_index import PrefixIndex


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_requests_that_share_blocks_end_in_any_order(order: tuple[int, ...]) -> None:
    """Two share three blocks, the third only two of them."""
    index = PrefixIndex()
    pool = BlockPool(8, index)
    tables = {0: pool.allocate(3)}
    for block in tables[0]:
        index.insert(bytes([block]), block)
    for request, shared in ((1, 3), (2, 2)):
        pool.share(tables[0][:shared])
        tables[request] = tables[0][:shared] + pool.allocate(1)
        pool.check(tables.values())
    for request in order:
        pool.release(tables.pop(request))
        pool.check(tables.values())
    assert (pool.free, pool.cached) == (5, 3)


def test_a_chain_is_evicted_from_its_end() -> None:
    index = PrefixIndex()
    pool = BlockPool(3, index)
    chain = pool.allocate(3)
    for block in chain:
        index.insert(bytes([block]), block)
    pool.release(chain)
    assert pool.allocate(2) == [chain[2], chain[1]]
    assert [block in index for block in chain] == [True, False, False]
    assert pool.evictions == 2


def test_misuse_is_our_bug() -> None:
    pool = BlockPool(2, PrefixIndex())
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="without checking"):
        pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="differ"):
        pool.check([blocks])
