"""The prefix-cached block manager: which blocks each request holds, in every KV cache group.

An allocation is a *plan* (how many blocks, which are adopted) and a *commit*. The manager counts
and carries out the same plan, so the two cannot disagree. The public verbs are those of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, lcm

from kvoffload.core.block_pool import NULL_BLOCK, BlockPool
from kvoffload.core.cache_stats import KVCacheEvent, PrefixCacheStats
from kvoffload.core.groups import Group, make_group
from kvoffload.core.hashing import HashChain
from kvoffload.core.interface import KVCacheConfig
from kvoffload.core.prefix import KVCacheBlocks, PrefixFinder, RequestLike
from kvoffload.core.request_blocks import RequestBlocks, stored_runs
from kvoffload.errors import KVCacheSpecError, UsageError


class KVCacheManager:
    """Gives requests their blocks, and finds blocks that hold a prefix already.

    Called on one thread. For each request: :meth:`get_computed_blocks`, then
    :meth:`allocate_slots` before every step, and :meth:`free` once at the end (also after
    preemption or abort).

    Args:
        config: the plan.
        max_model_len: no request gets slots beyond it.
        enable_caching: find and keep prefixes.
        enable_kv_cache_events: record events for :meth:`take_events`.
        log_stats: count lookups for :meth:`make_prefix_cache_stats`.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        max_model_len: int,
        enable_caching: bool = True,
        enable_kv_cache_events: bool = False,
        log_stats: bool = False,
    ) -> None:
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        if not specs:
            raise KVCacheSpecError("kv_cache_groups is empty: nothing to manage")
        self.config = config
        self.max_model_len = max_model_len
        self.hash_block_size = gcd(*(spec.block_size for spec in specs))
        """Tokens in a block of the requests' hash chains."""
        self.block_size = lcm(*(spec.block_size for spec in specs))
        """Prefix hits are multiples of so many tokens."""
        self.groups: tuple[Group, ...] = tuple(
            make_group(i, spec, self.hash_block_size) for i, spec in enumerate(specs)
        )
        self.enable_caching = enable_caching and all(group.findable for group in self.groups)
        self.pool = BlockPool(
            config.num_blocks, len(self.groups), enable_kv_cache_events and self.enable_caching
        )
        self._dropping = tuple(group for group in self.groups if group.drops_blocks)
        self._finder = PrefixFinder(self.pool, self.groups, self.hash_block_size, self.block_size)
        self._nothing = self._finder.nothing
        self._sequences: dict[str, RequestBlocks] = {}
        # By identity: what callers of pop_blocks_for_free() have yet to give back.
        self._deferred: dict[int, tuple[list[int], ...]] = {}
        self._stats = PrefixCacheStats() if log_stats else None

    # -- figures -----------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, from 0 to 1."""
        return self.pool.usage

    @property
    def keeps_all_blocks(self) -> bool:
        """Whether tables hold every block from the start, so that a gap can be computed in place.

        Where windows or states leave blocks out, a request whose load brought less than promised
        must be freed and admitted again.
        """
        return not self._dropping

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out, cached ones without a reference included."""
        return self.pool.num_free

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Return the counts since the last call; None without ``log_stats``."""
        stats = self._stats
        if stats is not None:
            self._stats = PrefixCacheStats()
        return stats

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events since the last call, in order."""
        return self.pool.take_events()

    def get_computed_blocks(self, request: RequestLike) -> tuple[KVCacheBlocks, int]:
        """Find the longest prefix of a request that is cached in every group.

        At least one token is left to compute, since the engine needs its logits. No block is
        adopted yet: a later allocation, eviction or reset may reuse the blocks found. Then
        :meth:`allocate_slots` refuses them, so look up right before it.

        Returns:
            The blocks by group (null where none is needed) and the number of tokens, a multiple
            of ``block_size``.
        """
        if not self.enable_caching:
            return self._nothing, 0
        return self._finder.find(request)

    # -- allocating --------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: RequestLike,
        num_new_tokens: int,
        *,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """Give a request slots for the tokens of its next step.

        In order of position::

            num_computed_tokens | new_computed (found) | external | new | lookahead

        Args:
            request: with ``num_computed_tokens`` as before this step.
            num_new_tokens: tokens to compute in the step; 0 if it only waits for external ones.
            num_new_computed_tokens: tokens found by :meth:`get_computed_blocks`.
            new_computed_blocks: the blocks found; only at a request's first allocation.
            num_lookahead_tokens: further slots, for tokens that may be rejected.
            num_external_computed_tokens: tokens a connector will load after the found ones.
            delay_cache_blocks: register nothing yet, because blocks are still being loaded; call
                :meth:`cache_blocks` when they are.
            num_encoder_tokens: length of the encoder input, for cross attention; at the first
                allocation.

        Returns:
            The blocks newly taken, by group; None if there are not enough: then nothing was
            taken (blocks behind a window, which the request needs no more, may have been given
            back).

        Raises:
            UsageError: blocks were found for a request that holds some already, or the blocks
                found do not contain its prefix (any more); nothing was taken.
            ValueError: a negative number of tokens.
        """
        lowest = min(
            num_new_tokens, num_new_computed_tokens, num_lookahead_tokens,
            num_external_computed_tokens, num_encoder_tokens,
        )  # fmt: skip
        if lowest < 0:
            raise ValueError(
                f"{num_new_tokens = }, {num_new_computed_tokens = }, {num_lookahead_tokens = }, "
                f"{num_external_computed_tokens = }, {num_encoder_tokens = }: counts of tokens "
                "must be 0 or more"
            )
        computed = (
            request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
        )
        num_tokens = min(computed + num_new_tokens, self.max_model_len)
        num_slots = min(num_tokens + num_lookahead_tokens, self.max_model_len)
        sequence = self._sequences.get(request.request_id)
        if sequence is not None:
            if num_new_computed_tokens or num_external_computed_tokens:
                raise UsageError(
                    f"{request.request_id} holds blocks already: a prefix is adopted only at the "
                    "first allocation; free() the request first"
                )
            if num_slots <= sequence.quiet:
                return self._nothing
            new = self._grow(sequence, computed, num_tokens, num_slots - num_tokens)
        else:
            found = self._nothing if new_computed_blocks is None else new_computed_blocks
            new = self._admit(
                request, found, num_new_computed_tokens, computed, num_external_computed_tokens,
                num_tokens, num_slots - num_tokens, num_encoder_tokens,
            )  # fmt: skip
            if new is not None:
                self._count_lookup(len(request.chain), num_new_computed_tokens)
        if new is not None and not delay_cache_blocks:
            chain = request.chain
            sequence = self._sequences[request.request_id]
            if self.enable_caching:
                self._register(sequence, chain, min(num_tokens, len(chain.token_ids)))
            sequence.settle(self.groups, self.max_model_len, self.enable_caching)
        return new

    def _grow(
        self, sequence: RequestBlocks, computed: int, num_tokens: int, lookahead: int
    ) -> KVCacheBlocks | None:
        for group in self._dropping:
            self.pool.release(sequence.drop(group, computed))
        plan = []
        total = 0
        for group, table in zip(self.groups, sequence.tables, strict=True):
            nulls, count = group.extend(len(table), num_tokens, lookahead)
            plan.append((table, nulls, count))
            total += count
        if not total:
            return self._nothing
        if total > self.pool.num_free:
            return None
        return self._append(plan, total)

    def _append(self, plan: Sequence[tuple[list[int], int, int]], total: int) -> KVCacheBlocks:
        """Carry out growth: for each table, so many null blocks and then so many taken ones."""
        taken = self.pool.take(total)
        new = []
        start = 0
        for table, nulls, count in plan:
            blocks = taken[start : start + count]
            start += count
            table.extend([NULL_BLOCK] * nulls)
            table.extend(blocks)
            new.append(blocks)
        return KVCacheBlocks(tuple(new))

    def _admit(
        self,
        request: RequestLike,
        found: KVCacheBlocks,
        num_found_tokens: int,
        computed: int,
        external: int,
        num_tokens: int,
        lookahead: int,
        num_encoder_tokens: int,
    ) -> KVCacheBlocks | None:
        """Give a request its first blocks: those found, those to be loaded, those to compute."""
        attempt = (
            self.pool.num_moves, computed, external, num_tokens, lookahead, num_encoder_tokens,
        )  # fmt: skip
        if found.refused_at == attempt:
            return None
        skips, loads, grows = [], [], []
        total = 0
        for group, hit in zip(self.groups, found.arrays, strict=True):
            skip = group.first_needed(computed)
            length = max(skip, len(hit))
            load = group.extend(length, computed, 0) if external else (0, 0)
            length += sum(load)
            nulls, count = group.extend(length, num_tokens, lookahead)
            count += group.encoder_blocks(num_encoder_tokens)
            skips.append(skip)
            loads.append(load)
            grows.append((nulls, count))
            total += load[1] + count
        num_free = self.pool.num_free
        if total > num_free:  # known without a look at the blocks found
            return None
        adopted = self._finder.confirm(found, skips, request, num_found_tokens)
        if total + sum(self.pool.num_idle(hit) for hit in adopted if len(hit)) > num_free:
            found.refused_at = attempt
            return None

        # Hits of all groups are held before anything is taken, or it might be one of them.
        sequence = RequestBlocks(len(self.groups))
        for index, (hit, skip) in enumerate(zip(adopted, skips, strict=True)):
            if len(hit):
                self.pool.adopt(hit)
            table: list[int] = hit.tolist()
            sequence.tables[index] = [NULL_BLOCK] * skip + table if skip else table
            sequence.live[index] = skip
            sequence.registered[index] = skip + len(hit)
        # Slots for loads of all groups come before slots for computing, as the tokens do.
        both = [
            (table, nulls, count)
            for growth in (loads, grows)
            for table, (nulls, count) in zip(sequence.tables, growth, strict=True)
        ]
        new = self._append(both, total)
        self._sequences[request.request_id] = sequence
        self._finder.forget(request.request_id)
        end = len(loads)
        loaded, grown = KVCacheBlocks(new.blocks[:end]), KVCacheBlocks(new.blocks[end:])
        return loaded + grown if external else grown

    def cache_blocks(self, request: RequestLike, num_computed_tokens: int) -> None:
        """Register the full blocks among a request's first ``num_computed_tokens`` tokens.

        :meth:`allocate_slots` does it by itself unless told to delay.
        """
        if self.enable_caching:
            sequence = self._sequences.get(request.request_id)
            if sequence is None:
                raise UsageError(
                    f"{request.request_id} holds no blocks: allocate_slots() comes first"
                )
            done = min(num_computed_tokens, len(request.chain), self.max_model_len)
            self._register(sequence, request.chain, done)

    def _register(self, sequence: RequestBlocks, chain: HashChain, num_tokens: int) -> None:
        registered = sequence.registered
        for group in self.groups:
            index = group.index
            full = num_tokens // group.block_size
            if full <= registered[index]:
                continue
            start = max(
                registered[index], sequence.live[index], group.first_registrable(num_tokens)
            )
            registered[index] = full
            blocks = sequence.tables[index][start:full]
            if not blocks or NULL_BLOCK in blocks:
                continue
            hashes = group.hashes(chain.hashes)
            known = self.pool.register(index, blocks, hashes[start:full])
            if self.pool.enable_events:
                for event in stored_runs(group, chain, hashes, start, full, known):
                    self.pool.add_event(event)

    def free(self, request: RequestLike) -> None:
        """Give back all blocks of a request, tails first. A request that holds none is no error."""
        self.free_blocks(self.pop_blocks_for_free(request))

    def pop_blocks_for_free(self, request: RequestLike) -> tuple[list[int], ...]:
        """Forget a request but keep its blocks from reuse, because a transfer still reads them.

        Returns:
            The argument of :meth:`free_blocks` once no transfer uses the blocks.
        """
        self._finder.forget(request.request_id)
        sequence = self._sequences.pop(request.request_id, None)
        if sequence is None:
            return ()
        held = sequence.tails_first()
        self._deferred[id(held)] = held
        return held

    def free_blocks(self, held: tuple[list[int], ...]) -> None:
        """Give back blocks that :meth:`pop_blocks_for_free` returned, once."""
        if not held:
            return
        if self._deferred.pop(id(held), None) is None:
            raise UsageError("these blocks were given back before")
        for blocks in held:
            if blocks:
                self.pool.release(blocks)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable, for instance because a load into them failed.

        Raises:
            ValueError: no block has such a number.
        """
        blocks = [block for block in block_ids if block != NULL_BLOCK]
        if blocks and not 0 < min(blocks) <= max(blocks) < self.pool.num_blocks:
            raise ValueError(
                f"block_ids from {min(blocks)} to {max(blocks)}: the cache has blocks 1 to "
                f"{self.pool.num_blocks - 1}"
            )
        self.pool.forget(blocks)

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; False, and nothing done, while a request holds blocks."""
        if not self.pool.reset():
            return False
        if self._stats is not None:
            self._stats = PrefixCacheStats(reset=True)
        return True

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return a request's block tables by group (empty if it holds none); copies."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return tuple([] for _ in self.groups)
        return tuple(table.copy() for table in sequence.tables)

    def _count_lookup(self, num_tokens: int, num_found: int) -> None:
        if self._stats is not None and self.enable_caching:
            self._stats.requests += 1
            self._stats.queries += num_tokens
            self._stats.hits += num_found
