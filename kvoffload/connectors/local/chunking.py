"""Chunks of KV cache groups: their keys, which a prefix needs, and the GPU blocks they are in.

Full attention reads all chunks from the start. A sliding window reads the chunks that cover the
last window. A recurrent layer reads the state at a token.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import lcm
from typing import NamedTuple, cast

import numpy as np

from kvoffload.config import OffloadConfig
from kvoffload.connectors.chunk_size import choose_chunk_size
from kvoffload.core.groups import Group, MambaGroup, make_group
from kvoffload.core.interface import KVCacheConfig, KVCacheSpec
from kvoffload.errors import ConfigError
from kvoffload.identity import LABEL, Fact
from kvoffload.messages import (
    BlockIds,
    CanonicalKVCaches,
    OffloadKey,
    make_offload_key,
)
from kvoffload.transfer.layout import ChunkLayout, Moves

log = logging.getLogger(__name__)

NULL_BLOCK = 0
"""Stands in block tables where a group needs no block; never stored or loaded."""


def kinds_of_groups(hash_block_size: int, config: KVCacheConfig | None) -> list[Group]:
    """Return what each KV cache group needs.

    Args:
        hash_block_size: tokens that a hash of a request stands for.
        config: of the cache; None for one group of full attention.

    Raises:
        ConfigError: no hash of a request ends where a block does.
    """
    if config is None:
        return [Group(0, KVCacheSpec(hash_block_size), hash_block_size)]
    kinds = [
        make_group(i, group.kv_cache_spec, hash_block_size)
        for i, group in enumerate(config.kv_cache_groups)
    ]
    for kind in kinds:
        if kind.block_size % hash_block_size:
            remedy = f"must divide the {kind.block_size} tokens of a block of group {kind.index}"
            raise ConfigError("block_size", hash_block_size, remedy)
    return kinds


def choose_blocks_per_chunk(kinds: Sequence[Group], kv_caches: CanonicalKVCaches) -> int:
    """Choose the number of blocks in a chunk by the KV cache, and log it with its reason.

    A chunk of recurrent states is one block whatever the number is; see :class:`ChunkGroup`.
    """
    sized = [i for i, kind in enumerate(kinds) if _is_cut(kind)]
    block_bytes = max(map(kv_caches.block_bytes, sized), default=0)
    block_tokens = max((kinds[i].block_size for i in sized), default=1)
    chosen = choose_chunk_size(block_bytes, block_tokens)
    log.info("kvoffload: %s", chosen.told(block_bytes, block_tokens))
    return chosen.num_blocks


def _is_cut(kind: Group) -> bool:
    """Whether chunks of a group are as many blocks as the settings say, or fewer."""
    return kind.findable and not isinstance(kind, MambaGroup)


class Piece(NamedTuple):
    """A chunk to store, by its group and its number."""

    group: int
    chunk: int


class Span(NamedTuple):
    """Consecutive blocks of one KV cache group to load."""

    group: "ChunkGroup"
    blocks: range
    chunks: range
    """Those that the blocks are in."""


class ChunkGroup:
    """One KV cache group, cut into chunks.

    Args:
        index: of the group.
        kind: what it needs.
        per_chunk: blocks in a chunk of the settings; fewer where that would never be whole.
    """

    def __init__(self, index: int, kind: Group, per_chunk: int) -> None:
        self.index = index
        self.key_end = make_offload_key(b"", index)
        """The end of its chunks' keys."""
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
        self.hashes_per_chunk = self.per_chunk * kind.hashes_per_block

    def _whole_in_window(self) -> bool:
        # Far enough into a sequence that windows have left the start behind.
        chunks = range(64, 128)
        tokens = self.per_chunk * self.block_size
        return all(self.kind.first_needed((i + 1) * tokens) <= i * self.per_chunk for i in chunks)

    def needed(self, start: int, end: int) -> range:
        """Return the blocks to load so that tokens from ``end`` on can be computed.

        What the group reads of the tokens before ``start`` is in GPU memory.
        """
        first = start // self.block_size
        if not self.reads_all:
            first = max(first, self.kind.first_needed(end))
        return range(first, end // self.block_size)

    def keeps_before(self, start: int, end: int, whole: int) -> bool:
        """Whether an engine that took in ``whole`` tokens has what ``end`` reads before ``start``.

        It has given up the blocks before ``start`` that are behind the window of ``whole``.
        """
        kept = min(self.kind.first_needed(whole), start // self.block_size)
        return self.kind.first_needed(end) >= kept

    def chunks(self, blocks: range) -> range:
        """Return the chunks that these blocks are in."""
        if not blocks:
            return range(0)
        return range(blocks.start // self.per_chunk, -(-blocks.stop // self.per_chunk))


Keys = Sequence[Sequence[OffloadKey]]
"""For each group, the keys of a request's full chunks from the first on."""
BlockTables = Sequence[Sequence[int]]
"""GPU block ids of a request from its first token on, for each group."""


class ChunkGroups:
    """All groups of a cache.

    Args:
        kinds: what each needs.
        per_chunk: blocks in a chunk.
    """

    def __init__(self, kinds: Sequence[Group], per_chunk: int) -> None:
        self.all = [ChunkGroup(i, kind, per_chunk) for i, kind in enumerate(kinds)]
        self.offloaded = [group for group in self.all if group.offloaded]
        # Full attention first: what it lacks, nothing else can make up for.
        self.by_reach = sorted(self.offloaded, key=lambda group: not group.reads_all)
        self.keeps_prefixes = len(self.offloaded) == 1 and self.offloaded[0].reads_all
        """Whether any part of a load from the start on is of use."""
        self.per_chunk = np.array([group.per_chunk for group in self.all])
        """Blocks in a chunk of each group."""
        self.alignment = lcm(*(group.block_size for group in self.all))

    def aligned(self, tokens: int) -> int:
        """Return the last token at or before this one at which all groups' blocks end."""
        return tokens - tokens % self.alignment

    def extend_keys(self, keys: list[list[OffloadKey]], hashes: Sequence[bytes]) -> None:
        """Add, for each group, the keys of a request's chunks that have become full.

        A chunk is named by its last block's hash. A new list takes the place of keys that the
        hashes contradict: they are of another request with this name, or of replaced tokens.
        """
        for group in self.offloaded:
            of_group, every = keys[group.index], group.hashes_per_chunk
            if not _are_of(of_group, group, hashes):
                of_group = keys[group.index] = []
            last = range((len(of_group) + 1) * every - 1, len(hashes), every)
            of_group += cast("list[OffloadKey]", [hashes[i] + group.key_end for i in last])

    def are_of(self, keys: Keys, hashes: Sequence[bytes]) -> bool:
        """Whether keys are of leading chunks of a prompt with these hashes."""
        return all(_are_of(keys[group.index], group, hashes) for group in self.offloaded)

    def agree(self, keys: Keys, hashes: Sequence[bytes]) -> bool:
        """Whether keys and hashes are of one prompt, as far as both reach."""
        return all(
            _are_of(keys[group.index][: len(hashes) // group.hashes_per_chunk], group, hashes)
            for group in self.offloaded
        )

    # ---- what was loaded ----

    def usable(self, start: int, end: int, good: Iterable[tuple[int, int]]) -> int:
        """Return up to which token a load can be used that brought these (group, block) only.

        A shorter prefix reads earlier blocks of a window. The load may have brought a part of their
        chunk and left these out, so chunks do not tell. Of the blocks before ``start``, an engine
        keeps those that the whole load's end needs.
        """
        there, whole = set(good), end
        for group in self.offloaded:
            if group.reads_all:
                for block in group.needed(start, end):
                    if (group.index, block) not in there:
                        end = self.aligned(block * group.block_size)
                        break
        windows = [group for group in self.offloaded if not group.reads_all]
        while end > start and not all(
            group.keeps_before(start, end, whole)
            and all((group.index, block) in there for block in group.needed(start, end))
            for group in windows
        ):
            end -= self.alignment
        return max(end, start)

    def tokens_by_medium(
        self, start: int, end: int, media: Mapping[tuple[int, int], str]
    ) -> Counter[str]:
        """Say from where the tokens of a loaded prefix came.

        The group that reads everything tells; where all have windows, the chunk they end with.
        Chunks of windows in null blocks were not loaded.
        """
        if end <= start:
            return Counter()
        group = self.by_reach[0]
        chunks = group.chunks(group.needed(start, end))
        if not group.reads_all:
            return Counter({media.get((group.index, chunks.stop - 1), "CPU"): end - start})
        of_chunks = [media[group.index, chunk] for chunk in chunks]
        tokens = Counter(of_chunks)
        for medium in tokens:
            tokens[medium] *= group.chunk_tokens
        # Only the ends may be parts of chunks.
        tokens[of_chunks[0]] -= start - chunks.start * group.chunk_tokens
        tokens[of_chunks[-1]] -= chunks.stop * group.chunk_tokens - end
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
        unread: set[OffloadKey] = set()
        for group in read:
            needed = group.chunks(group.needed(0, loaded_end))
            unread.update(keys[group.index])
            unread.difference_update(keys[group.index][needed.start : needed.stop])
        return [key for key in self.from_head_to_tail(keys) if key not in unread]


def _are_of(keys: Sequence[OffloadKey], group: ChunkGroup, hashes: Sequence[bytes]) -> bool:
    end = len(keys) * group.hashes_per_chunk
    if end > len(hashes):
        return False
    return not end or keys[-1] == hashes[end - 1] + group.key_end


def to_load(
    groups: ChunkGroups, tables: BlockTables, start: int, end: int, has_nulls: bool
) -> list[Span]:
    """List the blocks to load for the tokens from ``start`` to ``end``, by group.

    The engine needs nothing in the null blocks at the start of a table.
    """
    spans = []
    for group in groups.offloaded:
        blocks = group.needed(start, end)
        table = tables[group.index]
        while has_nulls and blocks and table[blocks[0]] == NULL_BLOCK:
            blocks = blocks[1:]
        if blocks:
            spans.append(Span(group, blocks, group.chunks(blocks)))
    return spans


def to_store(
    groups: ChunkGroups,
    tables: BlockTables,
    next_chunks: Sequence[int],
    num_computed_tokens: int,
    has_nulls: bool,
) -> list[Piece]:
    """List the chunks that have become full and are wholly in GPU memory, from head to tail."""
    pieces: list[Piece] = []
    for group in groups.offloaded:
        end = num_computed_tokens // group.chunk_tokens
        first = next_chunks[group.index]
        if group.is_state:
            # Only the state at the last computed token is there; it is kept at block ends.
            first = max(first, end - 1 if num_computed_tokens % group.block_size == 0 else end)
        table, per = tables[group.index], group.per_chunk
        pieces += [
            Piece(group.index, chunk)
            for chunk in range(first, end)
            if not has_nulls or NULL_BLOCK not in table[chunk * per : (chunk + 1) * per]
        ]
    if len(groups.offloaded) > 1:
        pieces.sort(key=lambda piece: (piece.chunk + 1) * groups.all[piece.group].chunk_tokens)
    return pieces


def cut_store(
    groups: ChunkGroups, pieces: Sequence[Piece], tables: BlockTables, host_slots: BlockIds
) -> Moves:
    """Name the GPU blocks of chunks to store, each chunk with its host slot."""
    blocks: list[int] = []
    for index, chunk in pieces:
        per = groups.all[index].per_chunk
        blocks.extend(tables[index][chunk * per : (chunk + 1) * per])
    group = np.array([piece.group for piece in pieces], np.intp)
    counts = groups.per_chunk[group]
    chunks = np.zeros((5, len(pieces)), np.int64)
    chunks[0], chunks[1], chunks[3], chunks[4] = host_slots, group, counts.cumsum() - counts, counts
    return Moves(chunks, np.array(blocks, np.int32))


def cut_load(spans: Sequence[Span], numbers: Sequence[list[int]], host_slots: BlockIds) -> Moves:
    """Name the GPU blocks of the first chunks of a load, each chunk with its host slot.

    Args:
        spans: all that is to be loaded, by group.
        numbers: of the blocks of each span.
        host_slots: of the chunks that are loaded.
    """
    moves = np.empty((5, len(host_slots)), np.int64)
    moves[0] = host_slots
    blocks: list[int] = []
    at = 0
    for (group, span, chunks), of_span in zip(spans, numbers, strict=True):
        some, per = chunks[: len(host_slots) - at], group.per_chunk
        starts = np.arange(some.start, some.stop) * per
        # The first chunk may begin within, and the last one end within.
        firsts, ends = starts.clip(span.start), (starts + per).clip(max=span.stop)
        places = firsts - span.start + len(blocks)
        moves[1, at : at + len(some)] = group.index
        moves[2:, at : at + len(some)] = firsts - starts, places, ends - firsts
        blocks += of_span[: max(0, some.stop * per - span.start)]
        at += len(some)
    return Moves(moves, np.array(blocks, np.int32))


def layout_facts(
    config: OffloadConfig,
    block_size: int,
    groups: ChunkGroups,
    layout: ChunkLayout,
    kv_cache_config: KVCacheConfig | None,
    named: Mapping[str, Fact],
) -> dict[str, Fact]:
    """Return the facts of the namespace that the layout decides, so that no engine names them.

    Args:
        config: settings.
        block_size: tokens of a block hash.
        groups: the KV cache groups.
        layout: of a slot.
        kv_cache_config: the engine's, if it has groups.
        named: by the engine.

    Raises:
        ConfigError: the engine has another meaning for a name of these facts.
    """
    facts: dict[str, Fact] = {
        "block_size": block_size,
        "blocks_per_chunk": config.blocks_per_chunk,
        "chunk_layout": layout.description,
    }
    if len(layout.regions) > 1:
        facts["chunk_tokens"] = f"{[group.chunk_tokens for group in groups.all]}"
    if kv_cache_config is not None:
        # A window or a state decides what its bytes were computed from.
        facts["kv_cache_groups"] = "\n".join(
            f"{group.layer_names} {group.kv_cache_spec}"
            for group in kv_cache_config.kv_cache_groups
        )
    for name in facts.keys() & named.keys():
        if named[name] != facts[name]:
            remedy = "the connector adds a fact of this name: give this one another name"
            raise ConfigError(f"facts.{name}", named[name], remedy)
    return facts


def _is_unicode(text: str) -> bool:
    """Whether a text is one: the name of a file may have bytes that are none."""
    return text.encode(errors="replace").decode() == text


def check_facts(facts: Mapping[str, Fact], config: OffloadConfig) -> None:
    """Tell an engine with tiers what its facts should name, and do not.

    Raises:
        ConfigError: there are none, or labels alone, which tell nothing apart. Or nothing tells the
            weights, and there are tiers. Or a fact has no one spelling.
    """
    given: object = facts  # an engine may not check its types
    if not isinstance(given, Mapping):
        raise ConfigError("facts", given, "must be a dictionary from names to facts")
    for name, value in given.items():
        if not isinstance(name, str):
            raise ConfigError("facts", name, "the name of a fact must be a text")
        if not isinstance(value, Fact) or (isinstance(value, str) and not _is_unicode(value)):
            remedy = "must be a text of Unicode, a whole number, true or false, bytes or None"
            raise ConfigError(f"facts.{name}", value, remedy)
    if all(name.startswith(LABEL) for name in facts):
        remedy = "must tell models apart: name the weights, dtype and kernels"
        raise ConfigError("facts", dict(facts), remedy)
    if config.has_tiers and facts.get("weights", True) in (None, ""):
        # As of folder_digest, for a folder without weights that it knows, or that it cannot read.
        remedy = "tells no weights, so other models would load these chunks: name them, as by a tag"
        raise ConfigError("facts.weights", facts["weights"], remedy)
    missing = [name for name in ("weights", "dtype") if name not in facts]
    if config.has_tiers and missing:
        log.warning(
            "kvoffload: facts do not name %s: an engine that differs in it, on these tiers, would "
            "load this engine's chunks as its own. kvoffload.folder_digest(folder) is a fact that "
            "tells weights.",
            " and ".join(missing),
        )
