"""Finding the longest prefix that every KV cache group can reuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvoffload.core.block_index import Ints
from kvoffload.core.block_pool import BlockPool
from kvoffload.core.groups import Group
from kvoffload.core.hashing import HashChain
from kvoffload.errors import UsageError

_MEMO_SIZE = 64


class RequestLike(Protocol):
    """What the manager reads of a request; see :class:`kvoffload.core.request.Request`."""

    num_computed_tokens: int

    @property
    def request_id(self) -> str: ...
    @property
    def chain(self) -> HashChain: ...


class KVCacheBlocks:
    """Block tables (or parts of them), one a group. Do not change the lists."""

    __slots__ = ("_arrays", "_blocks", "found_at", "found_for", "refused_at")

    def __init__(
        self, blocks: tuple[list[int], ...] | None = None, arrays: tuple[Ints, ...] | None = None
    ) -> None:
        self._blocks = blocks
        self._arrays = arrays
        self.found_for: HashChain | None = None
        """The chain of which a lookup found these blocks."""
        self.found_at = -1
        """The pool's ``num_losses`` at the lookup."""
        self.refused_at: object = None
        """The state of the pool, and the request, when these blocks did not suffice."""

    @property
    def blocks(self) -> tuple[list[int], ...]:
        if self._blocks is None:
            self._blocks = tuple(array.tolist() for array in self._arrays or ())
        return self._blocks

    @property
    def arrays(self) -> tuple[Ints, ...]:
        if self._arrays is None:
            self._arrays = tuple(np.array(ids, dtype=np.int32) for ids in self.blocks)
        return self._arrays

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.blocks

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        pairs = zip(self.blocks, other.blocks, strict=True)
        return KVCacheBlocks(tuple(mine + theirs for mine, theirs in pairs))

    def __repr__(self) -> str:
        return f"KVCacheBlocks({self.blocks})"


@dataclass(slots=True)
class _Memo:
    """A lookup that need not be repeated while nothing changed."""

    chain: HashChain
    max_tokens: int
    losses: int
    registrations: int
    blocks: KVCacheBlocks
    num_tokens: int


class PrefixFinder:
    """Answers lookups, and remembers the last answers while they hold.

    A request that cannot be admitted asks again at every step. Its answer is remembered together
    with what could change it: blocks found being forgotten, and blocks being registered.
    """

    def __init__(
        self, pool: BlockPool, groups: Sequence[Group], hash_block_size: int, block_size: int
    ) -> None:
        self.pool = pool
        self.groups = tuple(groups)
        self.hash_block_size = hash_block_size
        self.block_size = block_size
        self.nothing = KVCacheBlocks(tuple([] for _ in groups))
        # Kinds whose hits can only be cut short come first: they bound the search of the rest.
        self._search_order = sorted(groups, key=lambda group: not group.prefix_closed)
        self._memo: OrderedDict[str, _Memo] = OrderedDict()

    def forget(self, request_id: str) -> None:
        self._memo.pop(request_id, None)

    def find(self, request: RequestLike) -> tuple[KVCacheBlocks, int]:
        """Find the longest prefix that is cached in every group; one token is left to compute.

        Raises:
            UsageError: the request's blocks are hashed by another block size.
        """
        chain = request.chain
        memo = self._memo.get(request.request_id)
        if memo is None or not self._holds(memo, chain):
            pool, max_tokens = self.pool, len(chain) - 1
            found = self._find(chain, max_tokens)
            for table in found[0].arrays:
                pool.watch(table)
            memo = _Memo(chain, max_tokens, pool.num_losses, pool.num_registrations, *found)
            self._memo[request.request_id] = memo
            if len(self._memo) > _MEMO_SIZE:
                self._memo.popitem(last=False)
        return memo.blocks, memo.num_tokens

    def _holds(self, memo: _Memo, chain: HashChain) -> bool:
        """Whether a lookup would answer the same, judged in O(1); False if that cannot be told."""
        pool = self.pool
        # A request's id may have been that of another before; its chain is its own.
        if memo.chain is not chain or memo.max_tokens != len(chain) - 1:
            return False
        if memo.losses != pool.num_losses:
            return False
        if memo.registrations == pool.num_registrations:
            return True
        if memo.max_tokens - memo.num_tokens >= self.block_size:
            if len(self.groups) > 1 or not self.groups[0].prefix_closed:
                return False
            following = chain.hashes[memo.num_tokens // self.block_size]
            if pool.index.get(0, following):
                return False
        memo.registrations = pool.num_registrations
        return True

    def _find(self, chain: HashChain, max_tokens: int) -> tuple[KVCacheBlocks, int]:
        """Shorten the prefix until every group can reuse all of it.

        Each group answers with the longest prefix up to the limit that it could reuse by itself.
        The limit only falls; where it stays the same, it is the longest prefix for all groups.
        """
        if chain.block_size != self.hash_block_size:
            raise UsageError(
                f"the request's blocks are hashed by {chain.block_size} tokens, the cache's by "
                f"{self.hash_block_size}: make its BlockHasher with the manager's hash_block_size"
            )
        limit = max_tokens - max_tokens % self.block_size
        tables: dict[int, Ints] = {}
        agreed = False
        while limit > 0 and not agreed:
            agreed = True
            for group in self._search_order:
                if limit <= 0:
                    break
                index, num_blocks = group.index, limit // group.block_size
                table = tables.get(index)
                if table is None or not group.prefix_closed:
                    if table is None or len(table) != num_blocks:
                        hashes = group.hashes(chain.hashes)
                        table = group.find(self.pool.index, hashes, num_blocks)
                elif len(table) > num_blocks:
                    table = table[:num_blocks]
                tables[index] = table
                tokens = len(table) * group.block_size
                if tokens < limit:
                    limit = tokens - tokens % self.block_size
                    agreed = False
        if limit <= 0:
            return self.nothing, 0
        found = KVCacheBlocks(None, tuple(tables[i] for i in range(len(self.groups))))
        found.found_for, found.found_at = chain, self.pool.num_losses
        return found, limit

    def confirm(
        self, found: KVCacheBlocks, skips: Sequence[int], request: RequestLike, num_tokens: int
    ) -> list[Ints]:
        """Return the blocks of a lookup that a request adopts, if they still contain its prefix.

        The cost is O(groups) while the pool lost no block of any lookup; else hashes are compared.

        Raises:
            UsageError: a block does not contain the prefix (any more).
        """
        chain = request.chain
        current = found.found_for is chain and found.found_at == self.pool.num_losses
        adopted = []
        for group, table, skip in zip(self.groups, found.arrays, skips, strict=True):
            if len(table) * group.block_size < num_tokens:
                raise UsageError(
                    f"num_new_computed_tokens = {num_tokens} for {request.request_id}, but its "
                    f"new_computed_blocks hold {len(table) * group.block_size} tokens: pass on "
                    "both results of get_computed_blocks()"
                )
            blocks = table[skip:]
            # Null blocks lead a table, so the first block tells whether one is among them.
            if len(blocks) and not (
                blocks[0] and (current or self._contain(group, blocks, skip, chain))
            ):
                raise UsageError(
                    f"new_computed_blocks of {request.request_id} do not contain its prefix of "
                    f"{num_tokens} tokens (any more): call get_computed_blocks() again, right "
                    "before allocate_slots()"
                )
            adopted.append(blocks)
        return adopted

    def _contain(self, group: Group, blocks: Ints, start: int, chain: HashChain) -> bool:
        hashes = group.hashes(chain.hashes)[start : start + len(blocks)]
        return self.pool.is_registered(group.index, blocks, hashes)
