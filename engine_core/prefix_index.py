"""Finds blocks by what they hold: a chain of digests over (parent block, token ids). Pure.

The digest is keyed with a secret of this process and starts from the request's cache salt, so neither a collision nor a
guess gives anybody the KV of other tokens, and requests with different salts never share.
"""

import secrets
from collections.abc import Sequence
from hashlib import blake2b

from protocol.messages import pack_i32

DIGEST_BYTES = 16


class PrefixIndex:
    """Maps the digest of a full block and all before it to the block that holds its KV, one to one."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def root(self, salt: str) -> bytes:
        """The parent of a request's first block."""
        return blake2b(salt.encode(), digest_size=DIGEST_BYTES, key=self._key).digest()

    def digest(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The digest of a block that follows `parent` and holds `tokens`."""
        return blake2b(parent + pack_i32(tokens), digest_size=DIGEST_BYTES, key=self._key).digest()

    def find(self, digest: bytes) -> int | None:
        """The block with this digest, if there is one."""
        return self._block_of.get(digest)

    def insert(self, digest: bytes, block: int) -> None:
        """Let `block` be found. The first block with a digest stays the one that is found."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def forget(self, block: int) -> None:
        """The block is about to hold something else."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
