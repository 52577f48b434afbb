"""Which chunks of which KV cache groups make up a prefix.

A prefix can be loaded up to a token if every group has the chunks that it reads there. Full
attention reads all chunks from the start. A sliding window reads the chunks that cover the last
window. A recurrent layer reads the state at that token. A chunk that one group lacks shortens the
prefix for all groups, and groups with windows then read other chunks. So the search goes on until
all groups agree.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from kvoffload.core.groups import Group, MambaGroup, make_group
from kvoffload.core.interface import KVCacheConfig
from kvoffload.messages import OffloadKey, make_offload_key

NULL_BLOCK = 0
"""Stands in block tables where a group needs no block; never stored or loaded."""


class _Everything:
    """The kind of a cache that has one full-attention group, and no further description."""

    prefix_closed = True
    findable = True

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.hashes_per_block = 1

    def first_needed(self, num_computed_tokens: int) -> int:
        """Return 0: every block is needed."""
        return 0


@dataclass(frozen=True)
class Piece:
    """Blocks of one chunk that a transfer moves."""

    group: int
    chunk: int
    first_block: int
    end_block: int


class ChunkGroup:
    """One KV cache group, cut into chunks.

    Args:
        index: of the group.
        kind: what it needs.
        per_chunk: blocks in a chunk of the settings; fewer where that would never be whole.
    """

    def __init__(self, index: int, kind: Group | _Everything, per_chunk: int) -> None:
        self.index = index
        self.kind = kind
        self.block_size = kind.block_size
        self.is_state = isinstance(kind, MambaGroup)
        self.reads_all = kind.prefix_closed
        self.offloaded = kind.findable
        self.per_chunk = 1 if self.is_state else per_chunk
        if not self.reads_all and not self.is_state:
            # While a chunk is completed token by token, its first block must still be in the
            # window when its last one is full.
            while self.per_chunk > 1 and not self._whole_in_window():
                self.per_chunk -= 1
                while per_chunk % self.per_chunk:
                    self.per_chunk -= 1
        self.chunk_tokens = self.per_chunk * self.block_size
        self._hashes_per_chunk = self.per_chunk * kind.hashes_per_block

    def _whole_in_window(self) -> bool:
        # Far enough into a sequence that windows have left the start behind.
        chunks = range(64, 128)
        tokens = self.per_chunk * self.block_size
        return all(self.kind.first_needed((i + 1) * tokens) <= i * self.per_chunk for i in chunks)

    def extend_keys(self, keys: list[OffloadKey], hashes: Sequence[bytes]) -> None:
        """Add the keys of chunks that have become full; each is named by its last block's hash."""
        every = self._hashes_per_chunk
        for chunk in range(len(keys), len(hashes) // every):
            keys.append(make_offload_key(hashes[(chunk + 1) * every - 1], self.index))

    def needed(self, start: int, end: int) -> range:
        """Return the blocks to load so that tokens from ``end`` on can be computed.

        What the group reads of the tokens before ``start`` is in GPU memory.
        """
        first = self.kind.first_needed(end)
        return range(max(first, start // self.block_size), end // self.block_size)

    def chunks(self, blocks: range) -> range:
        """Return the chunks that these blocks are in."""
        if not blocks:
            return range(0)
        return range(blocks.start // self.per_chunk, -(-blocks.stop // self.per_chunk))

    def pieces(self, blocks: range) -> list[Piece]:
        """Cut blocks at the ends of chunks."""
        per = self.per_chunk
        return [
            Piece(self.index, c, max(c * per, blocks.start), min((c + 1) * per, blocks.stop))
            for c in self.chunks(blocks)
        ]


Keys = Sequence[Sequence[OffloadKey]]
"""For each group, the keys of a request's full chunks from the first on."""
Prefix = Callable[[Sequence[OffloadKey]], tuple[int, bool]]
"""Looks up consecutive chunks: how many there are, and whether the next may come soon."""
Find = Callable[[OffloadKey], bool | None]
"""Looks up one chunk; None: it may come soon."""
HasRoom = Callable[[Sequence[OffloadKey]], bool]
"""Whether chunks can be loaded all at once."""


class ChunkGroups:
    """All groups of a cache.

    Args:
        hash_block_size: tokens that a hash of a request stands for.
        per_chunk: blocks in a chunk.
        config: of the cache; None for one group of full attention.
    """

    def __init__(
        self, hash_block_size: int, per_chunk: int, config: KVCacheConfig | None = None
    ) -> None:
        kinds: list[Group | _Everything] = [_Everything(hash_block_size)]
        if config is not None:
            kinds = [
                make_group(i, group.kv_cache_spec, hash_block_size)
                for i, group in enumerate(config.kv_cache_groups)
            ]
        self.all = [ChunkGroup(i, kind, per_chunk) for i, kind in enumerate(kinds)]
        self.offloaded = [group for group in self.all if group.offloaded]
        # Full attention first: what it lacks, nothing else can make up for.
        self._by_reach = sorted(self.offloaded, key=lambda group: not group.reads_all)
        self.keeps_prefixes = len(self.offloaded) == 1 and self.offloaded[0].reads_all
        """Whether any part of a load from the start on is of use."""
        self.alignment = lcm(*(group.block_size for group in self.all))

    def aligned(self, tokens: int) -> int:
        """Return the last token at or before this one at which all groups' blocks end."""
        return tokens - tokens % self.alignment

    # ---- what can be loaded ----

    def longest(
        self,
        keys: Keys,
        start: int,
        limit: int,
        find_prefix: Prefix,
        find: Find,
        has_room: HasRoom,
    ) -> tuple[int, bool]:
        """Find how far a prompt can be loaded.

        Args:
            keys: of the prompt's chunks.
            start: tokens that GPU memory has.
            limit: tokens to load up to at most.
            find_prefix: looks up consecutive chunks.
            find: looks up one chunk.
            has_room: asked about the chunks of all groups together; ``find_prefix`` asks for its.

        Returns:
            ``(end, pending)``: tokens up to which all is there, ``start`` for nothing; and whether
            it may become more soon.
        """
        end = self.aligned(limit)
        answers: dict[OffloadKey, bool | None] = {}

        def has(key: OffloadKey) -> bool | None:
            if key not in answers:
                answers[key] = find(key)
            return answers[key]

        for group in self._by_reach:
            if group.reads_all and end > start:
                reach, pending = _reach(group, keys[group.index], start, end, find_prefix)
                if pending:
                    return start, True
                end = self.aligned(min(end, reach))
        agreed = False
        while end > start and not agreed:
            agreed = True
            before = end
            for group in self._by_reach:
                if group.reads_all:
                    continue
                shorter = self._window_end(group, keys[group.index], start, end, has)
                if shorter is None:
                    return start, True
                agreed = agreed and shorter == end
                end = shorter
            if agreed and not self.keeps_prefixes:
                end = self._last_with_room(keys, start, end, has_room)
                agreed = end == before
        return max(end, start), False

    def _last_with_room(self, keys: Keys, start: int, end: int, has_room: HasRoom) -> int:
        """Return the last end up to which all groups' chunks have room; ``start`` for none.

        A longer prefix is taken to need more room than a shorter one.
        """
        if end <= start or has_room(self._to_load(keys, start, end)):
            return end
        ends = range(start, end, self.alignment)
        too_long = bisect_left(
            ends, True, lo=1, key=lambda e: not has_room(self._to_load(keys, start, e))
        )
        return ends[too_long - 1]

    def _to_load(self, keys: Keys, start: int, end: int) -> list[OffloadKey]:
        """List the chunks of all groups that a load reads."""
        chunks = [(group.index, group.chunks(group.needed(start, end))) for group in self.offloaded]
        return [key for index, span in chunks for key in keys[index][span.start : span.stop]]

    def _window_end(
        self,
        group: ChunkGroup,
        keys: Sequence[OffloadKey],
        start: int,
        end: int,
        has: Find,
    ) -> int | None:
        """Return the last end at which a group has what it reads; None if that is not known yet."""
        while end > start:
            missing = None
            for chunk in group.chunks(group.needed(start, end)):
                # All are asked, so that questions to slow tiers travel together.
                answer = has(keys[chunk]) if chunk < len(keys) else False
                if answer is None:
                    return None
                if not answer:
                    missing = chunk
            if missing is None:
                return end
            end = self.aligned(min(end - 1, missing * group.chunk_tokens))
        return start

    # ---- what was loaded ----

    def usable(self, start: int, end: int, good: Iterable[tuple[int, int]]) -> int:
        """Return up to which token a load can be used that brought these (group, chunk) only."""
        there = set(good)
        for group in self.offloaded:
            if group.reads_all:
                for chunk in group.chunks(group.needed(start, end)):
                    if (group.index, chunk) not in there:
                        end = self.aligned(chunk * group.chunk_tokens)
                        break
        windows = [group for group in self.offloaded if not group.reads_all]
        while end > start and not all(
            (group.index, chunk) in there
            for group in windows
            for chunk in group.chunks(group.needed(start, end))
        ):
            end -= self.alignment
        return max(end, start)

    def tokens_by_medium(
        self, start: int, end: int, media: Mapping[tuple[int, int], str]
    ) -> Counter[str]:
        """Say from where the tokens of a loaded prefix came.

        The group that reads everything tells; where all have windows, the chunk they end with.
        """
        tokens: Counter[str] = Counter()
        if end <= start:
            return tokens
        group = self._by_reach[0]
        pieces = group.pieces(group.needed(start, end))
        if not group.reads_all:
            tokens[media[group.index, pieces[-1].chunk] if pieces else "CPU"] = end - start
            return tokens
        for piece in pieces:
            size = (piece.end_block - piece.first_block) * group.block_size
            tokens[media[group.index, piece.chunk]] += size
        return tokens

    # ---- orders ----

    def from_head_to_tail(self, keys: Keys) -> list[OffloadKey]:
        """Return the keys of all groups in the order of the tokens they stand for."""
        if len(keys) == 1:
            return list(keys[0])
        ends = [
            ((chunk + 1) * group.chunk_tokens, key)
            for group in self.offloaded
            for chunk, key in enumerate(keys[group.index])
        ]
        return [key for _, key in sorted(ends, key=lambda pair: pair[0])]

    def used(self, keys: Keys, loaded_end: int) -> list[OffloadKey]:
        """Return the chunks that a request uses, head to tail: of windows, those that it loads."""
        read = [group for group in self.offloaded if not group.reads_all]
        if not read:
            return self.from_head_to_tail(keys)
        masked: set[OffloadKey] = set()
        for group in read:
            needed = group.chunks(group.needed(0, loaded_end))
            masked.update(k for c, k in enumerate(keys[group.index]) if c not in needed)
        return [key for key in self.from_head_to_tail(keys) if key not in masked]


def _reach(
    group: ChunkGroup, keys: Sequence[OffloadKey], start: int, end: int, find_prefix: Prefix
) -> tuple[int, bool]:
    """Return up to which token a group that reads everything is there."""
    chunks = group.chunks(group.needed(start, end))
    wanted = keys[chunks.start : chunks.stop]
    if not wanted:
        return start, False
    hits, pending = find_prefix(wanted)
    if hits == len(chunks):
        return end, False
    return (chunks.start + hits) * group.chunk_tokens, pending
