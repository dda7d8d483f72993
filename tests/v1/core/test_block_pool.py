"""Reference counts, the order in which free blocks are reused, and content that can be found again."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from vllm.exceptions import IntegrityError
from vllm.v1.core.block_pool import BlockPool


def expected(pool: BlockPool, **refs: int) -> None:
    counts = np.zeros(pool.num_blocks, np.int32)
    for name, value in refs.items():
        counts[int(name[1:])] = value
    pool.check_integrity(counts)


def test_a_pool_needs_a_block():
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_blocks_come_untouched_in_order():
    pool = BlockPool(5)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) == [2, 3]
    assert (pool.num_free, pool.usage) == (1, 0.8)
    expected(pool, b0=1, b1=1, b2=1, b3=1)


def test_nothing_asked_for_nothing_given():
    pool = BlockPool(1)
    assert pool.allocate(0) == []
    assert pool.num_free == 1


def test_freed_blocks_are_reused_before_untouched_ones():
    pool = BlockPool(10)
    pool.release(pool.allocate(3))
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert pool.allocate(1) == [3]


def test_the_head_of_a_released_table_is_reused_first_when_it_has_no_content():
    pool = BlockPool(4)
    pool.release(pool.allocate(3))
    assert pool.allocate(2) == [0, 1]  # still warm, and in the order in which a table wants them


def test_asking_for_too_many_says_the_numbers():
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(IntegrityError, match="2 blocks wanted, 1 of 3 are free"):
        pool.allocate(2)


def test_a_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.share(np.array(blocks, np.intp))
    pool.release(blocks)
    assert pool.num_free == 1
    assert [pool.ref(block) for block in blocks] == [1, 1]
    pool.release(blocks)
    assert pool.num_free == 3
    expected(pool)


def test_unshare_takes_share_back():
    pool = BlockPool(2)
    blocks = np.array(pool.allocate(2), np.intp)
    pool.share(blocks)
    pool.unshare(blocks)
    expected(pool, b0=1, b1=1)


def test_releasing_what_nobody_holds_is_an_error():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(IntegrityError, match="block 0 is released but nobody holds it"):
        pool.release(blocks)


def test_content_is_found_while_held_and_when_free():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.register(block, b"d", b"tokens")
    assert pool.find(b"d", b"tokens") == block
    pool.release([block])
    assert pool.find(b"d", b"tokens") == block
    assert pool.num_free == 4
    pool.touch([block])
    assert (pool.num_free, pool.ref(block)) == (3, 1)


def test_a_hit_is_confirmed_by_the_token_ids():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register(block, b"d", b"tokens")
    assert pool.find(b"d", b"others") == -1
    assert pool.find(b"e", b"tokens") == -1


def test_of_two_blocks_with_one_content_the_first_is_found():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"d", b"t")
    pool.register(second, b"d", b"t")
    assert pool.find(b"d", b"t") == first
    assert not pool.is_registered(second)
    expected(pool, b0=1, b1=1)


def test_content_is_given_up_last_and_the_least_recently_freed_first():
    pool = BlockPool(5)
    a, b, c = pool.allocate(3)
    pool.register(a, b"a", b"a")
    pool.register(b, b"b", b"b")
    pool.release([b])
    pool.release([c])
    pool.release([a])
    assert pool.allocate(1) == [c]  # no content
    assert pool.allocate(2) == [3, 4]  # untouched
    assert pool.allocate(1) == [b]
    assert pool.find(b"b", b"b") == -1
    assert pool.find(b"a", b"a") == a
    assert pool.allocate(1) == [a]
    assert pool.num_cached == 0


def test_of_one_table_the_tail_is_given_up_first():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for index, block in enumerate(blocks):
        pool.register(block, bytes([index]), b"")
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.allocate(1) == [blocks[1]]


def test_a_hit_renews_a_blocks_place():
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.register(a, b"a", b"")
    pool.register(b, b"b", b"")
    pool.release([a])
    pool.release([b])
    pool.touch([a])
    pool.release([a])
    assert pool.allocate(1) == [b]


def test_forgotten_content_is_not_found():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register(block, b"a", b"")
    pool.forget(block)
    pool.forget(block)
    assert pool.find(b"a", b"") == -1
    pool.register(block, b"b", b"")
    assert pool.find(b"b", b"") == block


def test_reset_forgets_everything_but_not_while_a_block_is_held():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.register(blocks[0], b"a", b"")
    assert not pool.reset()
    assert pool.find(b"a", b"") == blocks[0]
    pool.release(blocks)
    assert pool.reset()
    assert (pool.num_cached, pool.num_free) == (0, 3)
    assert pool.find(b"a", b"") == -1
    expected(pool)
    assert sorted(pool.allocate(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pool: pool.refs.__setitem__(0, 2), "wrong reference counts.*\\(0, 2, 1\\)"),
        (lambda pool: pool._plain.append(0), "stand \\[1\\] times among the free ones"),
        (lambda pool: pool._plain.clear(), "stand \\[0, 0\\] times among the free ones"),
        (lambda pool: pool._by_digest.clear(), "has a digest that leads to None"),
        (lambda pool: pool._tokens.__setitem__(0, None), "a digest or token ids, but not both"),
        (lambda pool: pool._by_digest.__setitem__(b"x", 5), "2 digests lead to 1 blocks"),
    ],
)
def test_the_check_finds_what_is_wrong(spoil, message):
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    pool.register(blocks[0], b"a", b"")
    pool.release(blocks[1:])
    expected(pool, b0=1)
    spoil(pool)
    with pytest.raises(IntegrityError, match=message):
        expected(pool, b0=1)


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=80))
def test_any_order_of_calls_leaves_every_block_in_one_place(num_blocks, calls):
    """Against a model that is a dictionary of holders."""
    pool = BlockPool(num_blocks)
    tables: list[list[int]] = []
    digests: dict[bytes, int] = {}
    for what, number in calls:
        if what <= 1 and pool.num_free:
            count = 1 + number % pool.num_free
            blocks = pool.allocate(count)
            assert all(block not in table for table in tables for block in blocks)
            digests = {digest: block for digest, block in digests.items() if block not in blocks}
            tables.append(blocks)
        elif what == 2 and tables:
            pool.release(tables.pop(number % len(tables)))
        elif what == 3 and tables:
            table = tables[number % len(tables)]
            pool.share(np.array(table, np.intp))
            tables.append(list(table))
        elif what == 4 and tables:
            block = tables[number % len(tables)][0]
            digest = bytes([number])
            if not pool.is_registered(block) and digest not in digests:
                pool.register(block, digest, digest)
                digests[digest] = block
        elif what == 5:
            digest = bytes([number])
            block = pool.find(digest, digest)
            assert block == digests.get(digest, -1)
            if block >= 0:
                pool.touch([block])
                tables.append([block])
        counts = np.zeros(num_blocks, np.int32)
        for table in tables:
            counts[table] += 1
        pool.check_integrity(counts)
        assert pool.num_free == int((counts == 0).sum())
