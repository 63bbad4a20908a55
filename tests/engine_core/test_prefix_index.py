"""A block is found by everything that decides its content, and by nothing else (what a digest leaves out is a leak)."""

from engine_core.prefix_index import PrefixIndex
from engine_core.request import Block


def test_a_digest_depends_on_parent_tokens_salt_and_this_process() -> None:
    index = PrefixIndex(16, key=b"k" * 32)
    root, salted = index.root(""), index.root("salt")
    digests = [
        index.digest(root, [1, 2]),
        index.digest(root, [2, 1]),
        index.digest(root, [1]),
        index.digest(root, [1 | 2 << 8]),
        index.digest(salted, [1, 2]),
        index.digest(index.digest(root, [1, 2]), [1, 2]),
        PrefixIndex(16).digest(root, [1, 2]),
    ]
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {16}, "short ones collide"
    assert index.digest(root, [1, 2]) == digests[0]


def test_the_first_block_of_a_digest_is_found_until_it_is_forgotten() -> None:
    index = PrefixIndex(16)
    digest = index.digest(index.root(""), [1])
    first, second = Block(), Block()
    index.insert(digest, first)
    index.insert(digest, second)
    assert index.find(digest) is first
    assert not second.digest
    index.forget(second)
    index.forget(first)
    index.forget(first)
    assert index.find(digest) is None
    assert len(index) == 0
