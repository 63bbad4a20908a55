"""Finds blocks by what they hold: a chain of digests over (parent block, token ids). Pure.

The digest is keyed with a secret of this process and starts from the request's cache salt, so neither a collision nor a
guess gives anybody the KV of other tokens, and requests with different salts never share.
"""

import secrets
from collections.abc import Sequence
from hashlib import blake2b

from engine_core.request import Block, Request
from protocol.messages import pack_i32

DIGEST_BYTES = 16


class PrefixIndex:
    """Maps the digest of a full block and all before it to the block that holds its KV, in whichever pool, one to one.

    `block_size` is in tokens; with `enabled` off nothing is ever found.
    """

    def __init__(self, block_size: int, enabled: bool = True, key: bytes | None = None) -> None:
        self._block_size, self._enabled = block_size, enabled
        self._key = key or secrets.token_bytes(32)
        self._blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, digest: bytes) -> Block | None:
        """The block with this digest, if there is one."""
        return self._blocks.get(digest)

    def insert(self, digest: bytes, block: Block) -> None:
        """Let `block` be found. The first block with a digest stays the one that is found."""
        if digest not in self._blocks:
            self._blocks[digest] = block
            block.digest = digest

    def forget(self, block: Block) -> None:
        """The block is about to hold something else, or nothing to rely on."""
        if block.digest:
            del self._blocks[block.digest]
            block.digest = b""

    def prefix_of(self, request: Request) -> list[Block]:
        """The blocks of the longest known prefix of a request's tokens, always short of the last one."""
        blocks: list[Block] = []
        if not self._enabled or request.sampling.prompt_logprobs >= 0:
            return blocks
        for position in range((request.known - 1) // self._block_size):
            block = self.find(self._digest_of(request, position))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert_full(self, request: Request, done: int) -> None:
        """Let the full blocks of a request's first `done` tokens be found.

        `request.computed` may be more: a step in flight counts there, and may fail.
        """
        while self._enabled and (request.indexed + 1) * self._block_size <= min(done, request.computed):
            self.insert(self._digest_of(request, request.indexed), request.table[request.indexed])
            request.indexed += 1

    def root(self, salt: str) -> bytes:
        """The parent of a request's first block."""
        return blake2b(salt.encode(), digest_size=DIGEST_BYTES, key=self._key).digest()

    def digest(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The digest of a block that follows `parent` and holds `tokens`."""
        return blake2b(parent + pack_i32(tokens), digest_size=DIGEST_BYTES, key=self._key).digest()

    def _digest_of(self, request: Request, position: int) -> bytes:
        """The digest of a request's full block at `position`; those before it have been asked for already."""
        if position == len(request.digests):
            parent = request.digests[-1] if position else self.root(request.cache_salt)
            tokens = request.tokens(position * self._block_size, (position + 1) * self._block_size)
            request.digests.append(self.digest(parent, tokens))
        return request.digests[position]
