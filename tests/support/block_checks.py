"""Checks of the block manager's invariants, in O(blocks)."""

from kvoffload.core.block_pool import NULL_BLOCK
from kvoffload.core.interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec


def free_in_order(queue):
    """List a queue's free blocks, the next to be reused first."""
    stacked = queue._stacks[: queue._top][::-1].tolist()
    return stacked + queue._live(queue._head, queue._tail).tolist()


def check_queue(queue):
    """Verify a free queue; returns the free blocks."""
    order = free_in_order(queue)
    free = set(order)
    assert len(free) == len(order) == queue.num_free
    return free


def check_pool(pool):
    """Verify that each block is free, held or found as its records say."""
    free = check_queue(pool.free_queue)
    copies = {block for same in pool._copies.values() for block in same}
    listed = 0
    for block in range(1, pool.num_blocks):
        assert (pool._ref[block] == 0) == (block in free), f"block {block} is free and held"
        if not pool._cached[block]:
            continue
        key = pool.index.group_of(block), pool.index.hash_of(block)
        first = pool.index.get(*key)
        if block in copies:
            assert block in pool._copies[key], f"block {block} is no copy"
            assert first not in (0, block), f"block {block} is no copy of block {first}"
        else:
            assert first == block, f"block {block} is cached, but block {first} is found"
            listed += 1
    assert len(pool.index) == listed
    assert not pool._cached[NULL_BLOCK]
    assert pool._ref[NULL_BLOCK] == 1


def check_manager(manager):
    """Verify the pool, and compare its reference counts with all block tables."""
    pool = manager.pool
    check_pool(pool)
    holders = [0] * pool.num_blocks
    for request in manager._sequences.values():
        for table, live in zip(request.tables, request.live, strict=True):
            assert not any(table[:live]), "a block behind the window is still in a table"
            for block in table:
                holders[block] += block != NULL_BLOCK
    for held in manager._deferred.values():
        for blocks in held:
            for block in blocks:
                holders[block] += 1
    assert holders[1:] == list(pool._ref[1:])


def needed_tokens(spec, length):
    """Positions whose KV (or state) a request that goes on at ``length`` reads."""
    if isinstance(spec, SlidingWindowSpec):
        return range(max(length - spec.sliding_window + 1, 0), length)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return range(length // spec.attention_chunk_size * spec.attention_chunk_size, length)
    if isinstance(spec, MambaSpec):
        return range(max(length - 1, 0), length)
    return range(length)
