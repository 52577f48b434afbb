"""What the block manager and the connectors need to know of a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvoffload.core.hashing import HashChain


class Request:
    """One request of an engine. Subclass it, or make your own with the same attributes.

    Attributes:
        request_id: unique among live requests.
        chain: tokens and block hashes.
        num_computed_tokens: tokens whose KV is in GPU blocks; the engine advances it.
        priority: lower is served first; the core does not read it.
        kv_transfer_params: free-form hints for connectors.
        cache_salt: of the chain; names the request's tenant.
    """

    def __init__(
        self,
        request_id: str,
        chain: HashChain,
        *,
        num_computed_tokens: int = 0,
        priority: int = 0,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> None:
        self.request_id = request_id
        self.chain = chain
        self.num_computed_tokens = num_computed_tokens
        self.priority = priority
        self.kv_transfer_params = kv_transfer_params
        self.cache_salt = chain.extras.cache_salt

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output tokens; read only."""
        return self.chain.token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.chain.token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        """Hashes of the full blocks; read only."""
        return self.chain.hashes

    def append_token_ids(self, token_ids: Iterable[int]) -> None:
        self.chain.extend(token_ids)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.request_id!r}, {self.num_tokens} tokens, "
            f"{self.num_computed_tokens} computed)"
        )
