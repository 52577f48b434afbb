"""Attention whose result for a token does not depend on the batch the token is computed in."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvoffload.core.attention import CommonAttentionMetadata
from kvoffload.core.sdpa import SdpaPagedBackend

KEY_SPAN = 512
"""Keys are padded to a multiple of this: PyTorch's CPU kernel adds them up in spans of so many."""
QUERY_TILE = 16
"""Queries are padded to a multiple of this, so that the kernel's matrix products keep one shape."""
QUERY_ROWS = 256
"""Queries attended in one call; the keys after the last of them are left out."""


class InvariantPagedBackend(SdpaPagedBackend):
    """Paged attention like its base, but request by request and in whole tiles.

    A float32 token on the CPU then has the same bits in a chunk, in a batch, after preemption and
    on restored pages. So tests can compare outputs for equality.
    """

    def get_name(self) -> str:
        return "SDPA_PAGED_INVARIANT"

    def attend(self, query: Tensor, kv_cache: Tensor, metadata: CommonAttentionMetadata) -> Tensor:
        """Attend every query to its request's keys up to itself: ``[T, heads, D]`` as given."""
        out = torch.empty_like(query)
        starts = metadata.query_start_loc_cpu.tolist()
        lengths = metadata.seq_lens_cpu.tolist()
        for i, length in enumerate(lengths):
            rows = slice(starts[i], starts[i + 1])
            table = metadata.block_table_tensor[i]
            out[rows] = _attend_one(
                query[rows], kv_cache, table, length, self.sliding_window, self.scale
            )
        return out


def _attend_one(
    query: Tensor,
    kv_cache: Tensor,
    block_ids: Tensor,
    length: int,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """Attend one request's last ``len(query)`` tokens; it has ``length`` with them."""
    block_size = kv_cache.shape[2]
    span = -(-length // KEY_SPAN) * KEY_SPAN
    # The null block pads the table; what it holds is masked out.
    table = F.pad(block_ids[: -(-length // block_size)], (0, -(-span // block_size)))
    pages = kv_cache[:, table[: -(-span // block_size)].long()]
    key, value = pages.flatten(1, 2)[:, :span].transpose(1, 2).unsqueeze(1)  # [1, heads, span, D]

    out = torch.empty_like(query)
    for begin in range(0, len(query), QUERY_ROWS):
        part = query[begin : begin + QUERY_ROWS]
        first = length - len(query) + begin
        rows = -(-len(part) // QUERY_TILE) * QUERY_TILE
        keys = -(-(first + len(part)) // KEY_SPAN) * KEY_SPAN
        padded = F.pad(part, (0, 0, 0, 0, 0, rows - len(part))).transpose(0, 1).unsqueeze(0)
        mixed = F.scaled_dot_product_attention(
            padded,
            key[:, :, :keys],
            value[:, :, :keys],
            attn_mask=_causal(first, rows, keys, window, query),
            scale=scale,
            enable_gqa=True,
        )
        out[begin : begin + len(part)] = mixed[0, :, : len(part)].transpose(0, 1)
    return out


def _causal(first: int, rows: int, keys: int, window: int | None, like: Tensor) -> Tensor:
    """Additive mask: row r stands at position ``first + r`` and sees the keys up to there."""
    hidden = torch.full((rows, keys), float("-inf"), dtype=like.dtype, device=like.device)
    mask = hidden.triu(first + 1)
    return mask if window is None else mask + hidden.tril(first - window)
