"""Block tables of requests: which GPU blocks the chunks of a load or a store are in."""

from collections.abc import Iterable, Sequence

from kvoffload.connectors.chunking import NULL_BLOCK, ChunkGroup, ChunkGroups, Piece
from kvoffload.messages import GPULoadStoreSpec

BlockTables = Sequence[Sequence[int]]
"""GPU block ids of a request from its first token on, for each KV cache group."""


def to_load(
    groups: ChunkGroups, tables: BlockTables, start: int, end: int, has_nulls: bool
) -> list[Piece]:
    """List the parts of chunks to load for the tokens from ``start`` to ``end``, by group.

    The engine needs nothing in the null blocks at the start of a table.
    """
    pieces: list[Piece] = []
    for group in groups.offloaded:
        blocks = group.needed(start, end)
        table = tables[group.index]
        while has_nulls and blocks and table[blocks[0]] == NULL_BLOCK:
            blocks = blocks[1:]
        pieces.extend(group.pieces(blocks))
    return pieces


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
        for chunk in range(first, end):
            piece = _whole(group, chunk)
            blocks = tables[group.index][piece.first_block : piece.end_block]
            if not has_nulls or NULL_BLOCK not in blocks:
                pieces.append(piece)
    if len(groups.offloaded) > 1:
        pieces.sort(key=lambda piece: piece.end_block * groups.all[piece.group].block_size)
    return pieces


def _whole(group: ChunkGroup, chunk: int) -> Piece:
    return Piece(group.index, chunk, chunk * group.per_chunk, (chunk + 1) * group.per_chunk)


def gpu_end(groups: ChunkGroups, pieces: Sequence[Piece], tables: BlockTables) -> GPULoadStoreSpec:
    """Name the GPU blocks of parts of chunks, which are listed group after group."""
    count = len(groups.all)
    blocks: list[int] = []
    sizes, firsts = [0] * count, [0] * count
    for piece in pieces:
        if not sizes[piece.group]:
            firsts[piece.group] = piece.first_block
        sizes[piece.group] += piece.end_block - piece.first_block
        blocks.extend(tables[piece.group][piece.first_block : piece.end_block])
    return GPULoadStoreSpec(blocks, sizes, firsts)


class BusyBlocks:
    """GPU blocks that jobs in flight read (stores) or write (loads)."""

    def __init__(self) -> None:
        self._jobs_of: dict[int, list[int]] = {}
        self._blocks_of: dict[int, Sequence[int]] = {}

    def begin(self, job_id: int, blocks: Sequence[int]) -> None:
        """Note the blocks of a job."""
        self._blocks_of[job_id] = blocks
        for block in blocks:
            self._jobs_of.setdefault(block, []).append(job_id)

    def end(self, job_id: int) -> None:
        """Forget the blocks of a job, if it has any."""
        for block in self._blocks_of.pop(job_id, ()):
            jobs = self._jobs_of[block]
            jobs.remove(job_id)
            if not jobs:
                del self._jobs_of[block]

    def jobs(self, blocks: Iterable[int]) -> set[int]:
        """Return the jobs in flight that use one of these blocks."""
        busy = self._jobs_of
        return {job for block in blocks for job in busy.get(block, ())} if busy else set()
