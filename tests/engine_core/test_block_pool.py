"""Each place of both pools is in one set at a time, in whatever order requests that share blocks end or move."""

from itertools import permutations

import pytest

from engine_core.block_pool import BlockPool
from engine_core.plan import Copy
from engine_core.prefix_index import PrefixIndex
from engine_core.request import NOWHERE, Block, Motion, surviving


def make_pool(num_blocks: int, host_blocks: int = 0) -> tuple[BlockPool, PrefixIndex]:
    index = PrefixIndex(16)
    pool = BlockPool(num_blocks, index)
    pool.grow_host(host_blocks)
    return pool, index


def index_all(index: PrefixIndex, blocks: list[Block]) -> None:
    for number, block in enumerate(blocks):
        index.insert(bytes([number]), block)


def land_all(pool: BlockPool, ok: bool = True) -> list[Copy]:
    copies, pool.copies = pool.copies, []
    for copy in copies:
        assert pool.landed(copy, ok) is not None
    return copies


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_requests_that_share_blocks_end_in_any_order(order: tuple[int, ...]) -> None:
    """Two share three blocks, the third only two of them."""
    pool, index = make_pool(8)
    tables = {0: pool.allocate(3)}
    index_all(index, tables[0])
    for request, shared in ((1, 3), (2, 2)):
        pool.hold(tables[0][:shared])
        tables[request] = tables[0][:shared] + pool.allocate(1)
        pool.check(tables.values(), [])
    for request in order:
        pool.release(tables.pop(request))
        pool.check(tables.values(), [])
    assert (pool.free, pool.cached) == (5, 3)


def test_a_chain_is_evicted_from_its_end() -> None:
    pool, index = make_pool(3)
    chain = pool.allocate(3)
    index_all(index, chain)
    places = [block.device for block in chain]
    pool.release(chain)
    assert [block.device for block in pool.allocate(2)] == [places[2], places[1]]
    assert [bool(block.digest) for block in chain] == [True, False, False]
    assert [surviving([block]) for block in chain] == [chain[:1], [], []]
    assert surviving(chain) == chain[:1]
    assert pool.evictions == 2


def test_a_block_that_leaves_is_free_only_when_its_copy_has_landed() -> None:
    pool, _ = make_pool(1, host_blocks=1)
    (block,) = table = pool.allocate(1)
    pool.claim(table)
    pool.save(table)
    pool.release(table)
    assert (pool.available, pool.coming) == (0, 1)
    pool.check([], [table])
    (copy,) = land_all(pool)
    assert (copy.device, copy.host, copy.out) == (block.device, block.host, True)
    assert (pool.available, pool.coming) == (1, 0)
    pool.check([], [table])


def test_a_block_that_comes_back_keeps_its_image_until_it_is_written() -> None:
    pool, _ = make_pool(1, host_blocks=1)
    table = pool.allocate(1)
    for _ in range(2):
        pool.claim(table)
        pool.save([block for block in table if block.host == NOWHERE])
        pool.release(table)
        land_all(pool)
        pool.release(pool.allocate(1))  # its place is used by somebody else
        pool.hold(table)
        pool.unclaim(table)
        assert table[0].motion is Motion.ARRIVING
        assert [copy.out for copy in land_all(pool)] == [False]
        pool.check([table], [])
    assert pool.moving == 0
    assert pool.host_used == 1
    pool.spoil(table[0])
    assert pool.host_used == 0
    pool.check([table], [])


def test_cached_blocks_move_to_the_host_pool_and_are_found_there() -> None:
    pool, index = make_pool(2, host_blocks=2)
    chain = pool.allocate(2)
    index_all(index, chain)
    pool.release(chain)
    assert (pool.available, pool.cached) == (0, 2), "what would be lost is not evicted at once"
    assert pool.save_cached(5) == 2
    land_all(pool)
    others = pool.allocate(2)
    assert index.find(bytes([0])) is chain[0]
    assert chain[0].device == NOWHERE
    pool.release(others)
    pool.hold(chain)
    land_all(pool)
    pool.check([chain], [])


def test_room_for_a_request_is_made_of_the_blocks_of_others_first() -> None:
    """Its own would be places that it needs again: the room that was made would not be enough."""
    pool, index = make_pool(6, host_blocks=1)
    claimed = pool.allocate(1)
    pool.claim(claimed)
    pool.save(claimed)
    pool.release(claimed)
    land_all(pool)
    assert pool.host_room == 0
    own, others = pool.allocate(2), pool.allocate(3)
    index_all(index, own + others)
    pool.release(own)
    pool.release(others)
    assert pool.save_cached(3, own) == 3
    assert pool.places_for(own) == 0
    assert pool.save_cached(2, own) == 2
    assert pool.places_for(own) == 2


def test_claimed_images_are_kept_and_cached_ones_make_room() -> None:
    pool, index = make_pool(4, host_blocks=2)
    cached, claimed = (pool.allocate(1) for _ in range(2))
    index_all(index, cached)
    pool.release(cached)
    pool.save_cached(1)
    land_all(pool)
    pool.claim(claimed)
    assert pool.host_room == 2
    pool.save(claimed)
    pool.release(claimed)
    land_all(pool)
    assert pool.host_room == 1
    other = pool.allocate(1)
    pool.save(other)
    assert cached[0].host == NOWHERE, "nobody counted on it"
    assert pool.host_room == 0
    assert claimed[0].host != NOWHERE
    pool.check([other], [claimed])


def test_a_failed_copy_out_leaves_the_block_where_it_was() -> None:
    pool, _ = make_pool(1, host_blocks=1)
    table = pool.allocate(1)
    pool.claim(table)
    pool.save(table)
    pool.release(table)
    land_all(pool, ok=False)
    assert surviving(table) == table
    assert (pool.available, pool.host_used) == (1, 0)
    pool.check([], [table])
    pool.allocate(1)
    assert surviving(table) == []


def test_a_failed_copy_in_breaks_the_block_and_nobody_finds_it() -> None:
    pool, index = make_pool(1, host_blocks=1)
    table = pool.allocate(1)
    index_all(index, table)
    pool.release(table)
    pool.save_cached(1)
    land_all(pool)
    pool.release(pool.allocate(1))
    pool.hold(table)
    land_all(pool, ok=False)
    assert surviving(table) == []
    assert len(index) == 0
    pool.check([table], [])
    pool.release(table)
    assert (pool.free, pool.host_used) == (1, 0)


def test_stray_copies_are_counted_and_passed_over() -> None:
    """A copy that ends twice, or that was never started, changes nothing."""
    pool, _ = make_pool(1, host_blocks=1)
    table = pool.allocate(1)
    pool.save(table)
    (copy,) = land_all(pool)
    for stray in (copy, Copy(0, 0, 99, True)):
        assert pool.landed(stray, True) is None
    assert pool.strays == 2
    pool.check([table], [])


def test_misuse_is_our_bug() -> None:
    pool, _ = make_pool(2)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="without checking"):
        pool.allocate(1)
    with pytest.raises(AssertionError, match="differ"):
        pool.check([], [blocks])
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)
