"""Whose KV is in the device pool: brings requests in and takes them out, by swap or by recompute. Pure.

A swap copies the blocks that nobody else holds and that have no image in the host pool yet; their places are free when
the copies have landed. What others hold stays where it is. The request claims all of its blocks, wherever they are, and
coming in again finds them in either pool. Where swapping is off, too dear or impossible, the KV is dropped and the
tokens are kept, to be computed again (recompute).
"""

from bisect import insort
from dataclasses import dataclass

from engine_core.block_pool import BlockPool
from engine_core.plan import Landed
from engine_core.prefix_index import PrefixIndex
from engine_core.request import NOWHERE, Block, Motion, Request, State, surviving
from engine_core.swap import Rates, SwapPolicy


@dataclass(slots=True)
class SwapCounts:
    """What preemption has done since the start. Seconds are those of the copies themselves."""

    swapped: int = 0
    resumed: int = 0
    recomputed: int = 0  # KV dropped, or found lost after a copy that failed
    rejected: int = 0  # for want of room in the host pool
    failed: int = 0  # blocks whose copy failed
    blocks_out: int = 0
    blocks_in: int = 0
    seconds_out: float = 0.0
    seconds_in: float = 0.0
    most_swapped: int = 0


class Residency:
    """The requests that have run: those that are in, in order, and those that are paused."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool, policy: SwapPolicy) -> None:
        self.policy, self._block_size = policy, block_size
        self.index = PrefixIndex(block_size, prefix_cache)
        self.pool = BlockPool(num_blocks, self.index)
        self.running: list[Request] = []  # PREFILL, DECODE, SWAPPING_IN
        self.paused: list[Request] = []  # SWAPPING_OUT, SWAPPED, and WAITING to be computed again
        self.counts = SwapCounts()
        self.rates = Rates()
        self.pauses: list[tuple[Request, bool]] = []  # who was paused (True) or runs again; the caller empties it
        self.now = 0.0

    @property
    def swaps(self) -> bool:
        """Whether requests can be swapped out at all."""
        return self.pool.host_blocks > 0 and self.policy.preemption != "recompute"

    @property
    def swapped(self) -> int:
        """Requests that are swapped out, or on their way."""
        return sum(request.state is not State.WAITING for request in self.paused)

    def block_count(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self._block_size)

    # -- in ------------------------------------------------------------------------------------------------------

    def surviving_blocks(self, request: Request) -> list[Block]:
        """The blocks with the first tokens of a request that is out: its own if it was swapped, else cached ones."""
        if request.state is not State.SWAPPED:
            return self.index.prefix_of(request)
        return surviving(request.table)

    def bring_in(self, request: Request, found: list[Block]) -> None:
        """Give a request its blocks, `found` among them; it runs as soon as those from the host pool have arrived."""
        self.pool.hold(found)
        kept = len(found) * self._block_size
        if request.state is State.SWAPPED:
            self.pool.unclaim(request.table)
            self.counts.resumed += 1
        if request.state is State.SWAPPED and kept < request.computed:
            self._count_recompute(request)
        if request.state is not State.SWAPPED or kept < request.computed:
            request.computed, request.indexed, request.state_before_swap = kept, len(found), State.PREFILL
        if request.cached_tokens >= 0:
            self.paused.remove(request)
        request.table = found + self.pool.allocate(self.block_count(request.known) - len(found))
        request.blocks = [block.device for block in request.table]
        request.came_in, request.mark, request.is_promised = self.now, request.reached, False
        insort(self.running, request, key=in_order)
        request.enter(State.SWAPPING_IN, self.now)
        self._run_if_arrived(request)

    def _run_if_arrived(self, request: Request) -> None:
        if any(block.motion is Motion.ARRIVING for block in request.table):
            return
        if request.computed % self._block_size:  # the last block will be written
            self.pool.spoil(request.table[request.computed // self._block_size])
        request.enter(request.state_before_swap, self.now)
        if request.swaps or request.recomputes:
            self.pauses.append((request, False))

    # -- out -----------------------------------------------------------------------------------------------------

    def can_swap(self, request: Request, promised: int = 0) -> bool:
        """Whether a running request can be swapped out: there is room for what has to be copied, beside `promised`."""
        return self.swaps and self.host_cost(request) + promised <= self.pool.host_room

    def host_cost(self, request: Request) -> int:
        """How many places of the host pool that have room it takes to swap a running request out."""
        return self.pool.host_cost(self._used(request))

    def _used(self, request: Request) -> list[Block]:
        return request.table[: self.block_count(request.computed)]

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away, by whichever means is possible and cheaper."""
        used = self._used(request)
        mine = [block for block in used if block.holders == 1]
        tokens = request.computed - (len(used) - len(mine)) * self._block_size
        unsaved = sum(block.host == NOWHERE for block in mine)
        worth = self.policy.preemption == "swap" or self.rates.swap_is_cheaper(unsaved, len(mine), tokens)
        if not (self.swaps and used and worth and self.swap_out(request)):
            self._count_recompute(request)
            self._pause(request, [])

    def _count_recompute(self, request: Request) -> None:
        request.recomputes += 1
        self.counts.recomputed += 1

    def swap_out(self, request: Request) -> bool:
        """Check the room, copy, and only then let go; False if there is no room, and nothing has changed."""
        if not self.can_swap(request):
            self.counts.rejected += 1
            return False
        used = self._used(request)
        self.pool.claim(used)
        self.pool.save(block for block in used if block.holders == 1 and block.host == NOWHERE)
        request.swaps += 1
        self.counts.swapped += 1
        self._pause(request, used)
        return True

    def _pause(self, request: Request, claimed: list[Block]) -> None:
        """Move a running request to the paused ones, with what it claims of its table."""
        self.pool.release(request.table, is_droppable=not claimed)
        self.running.remove(request)
        if request.state is not State.SWAPPING_IN:
            request.state_before_swap = request.state
            self.pauses.append((request, True))
        request.table, request.blocks, request.paused_at = claimed, [], self.now
        request.enter(State.SWAPPING_OUT if claimed else State.WAITING, self.now)
        if not claimed:
            request.computed = request.indexed = 0
        self.paused.append(request)
        self._rest_if_out(request)
        self.counts.most_swapped = max(self.counts.most_swapped, self.swapped)

    def _rest_if_out(self, request: Request) -> None:
        if request.state is State.SWAPPING_OUT and all(block.motion is not Motion.LEAVING for block in request.table):
            request.enter(State.SWAPPED, self.now)

    def leave(self, request: Request) -> None:
        """The request has ended: let go of all that it holds or claims."""
        if request in self.running:
            self.running.remove(request)
            self.pool.release(request.table)
        else:
            self.paused.remove(request)
            self.pool.unclaim(request.table)
        request.table, request.blocks = [], []

    # -- copies --------------------------------------------------------------------------------------------------

    def land(self, landed: Landed) -> None:
        """Take in that copies have ended, well or not."""
        for copy in landed.copies:
            block = self.pool.landed(copy, landed.ok)
            if block is not None and block.is_broken:
                for request in [request for request in self.running if block in request.table]:
                    self._give_up(request, block)
        self._count(landed)
        for request in list(self.running):
            if request.state is State.SWAPPING_IN:
                self._run_if_arrived(request)
        for request in self.paused:
            self._rest_if_out(request)

    def _give_up(self, request: Request, broken: Block) -> None:
        """A block of a request that was to come in is lost: keep what is before it, and compute the rest again."""
        kept = request.table[: request.table.index(broken)]
        request.computed = len(kept) * self._block_size
        request.indexed = min(request.indexed, len(kept))
        request.state_before_swap = State.PREFILL
        self._count_recompute(request)
        self.pool.claim(kept)
        self._pause(request, kept)

    def _count(self, landed: Landed) -> None:
        count, counts = len(landed.copies), self.counts
        if not landed.ok:
            counts.failed += count
        elif landed.copies[0].out:
            counts.blocks_out += count
            counts.seconds_out += landed.seconds
            self.rates.learn("copy_out", count, landed.seconds)
        else:
            counts.blocks_in += count
            counts.seconds_in += landed.seconds
            self.rates.learn("copy_in", count, landed.seconds)

    def check(self) -> None:
        """Prove the invariants between requests and blocks. For tests and debugging."""
        self.pool.check([r.table for r in self.running], [r.table for r in self.paused])
        assert self.running == sorted(self.running, key=in_order)
        for request in self.paused:
            assert not request.blocks
            assert (request.state is State.WAITING) == (not request.table)
            is_leaving = any(block.motion is Motion.LEAVING for block in request.table)
            assert request.state is not State.SWAPPING_OUT or is_leaving, "nothing will tell it that it is out"
        for request in self.running:
            assert request.blocks == [block.device for block in request.table]
            is_arriving = any(block.motion is Motion.ARRIVING for block in request.table)
            assert (request.state is State.SWAPPING_IN) == is_arriving, "it runs before its blocks are there, or never"
        for request in self.running + self.paused:
            assert request.computed <= len(request.table) * self._block_size


def in_order(request: Request) -> tuple[int, float, int]:
    """Sort key: by priority, then by age and length."""
    return request.priority, request.due, request.sequence
