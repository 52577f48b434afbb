"""What operators ask an engine whose scheduler and worker share a process."""

import os
from collections.abc import Iterator

from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.connectors.cache_lookup import KeyedGroup, look_up
from kvoffload.connectors.control_server import Operated, Refused
from kvoffload.connectors.local.chunking import ChunkGroups
from kvoffload.connectors.local.transfers import Transfers
from kvoffload.control import HOST, EngineFacts, Found
from kvoffload.core.hashing import BlockHasher, HashChain
from kvoffload.offload.base import Manager, OffloadKey

_LONGEST_NAME = 80


class LocalOperators(Operated):
    """Carries out operators' orders, in the engine's calls of ``poll``.

    Args:
        spec: has the stores, and the settings.
        manager: decides.
        transfers: in flight.
        groups: of the chunks.
        hasher: of the engine's prompts; None if it is not known.
        model: its name, for people.
    """

    def __init__(
        self,
        spec: TieredOffloadingSpec,
        manager: Manager,
        transfers: Transfers,
        groups: ChunkGroups,
        hasher: BlockHasher | None,
        model: str,
    ) -> None:
        super().__init__()
        self._config = spec.config
        self._spec, self._manager, self._transfers = spec, manager, transfers
        self._groups = groups
        self._hasher = hasher
        self._model = model[:_LONGEST_NAME]
        self.serve(self._config.control_socket)

    # ---- on the server's thread ----

    def facts(self) -> EngineFacts:
        host = [HOST] if self._config.cpu_bytes else []
        return EngineFacts(os.getpid(), self._model, "", [*host, *self._spec.tiers])

    def lookup(self, token_ids: list[int], salt: str) -> Iterator[Found | None]:
        if self._hasher is None:
            raise Refused("the engine gave LocalConnector no hasher to look prompts up with")
        chain = HashChain(self._hasher, token_ids, cache_salt=salt or None)
        keys: list[list[OffloadKey]] = [[] for _ in self._groups.all]
        self._groups.extend_keys(keys, chain.hashes)
        groups = [
            KeyedGroup(keys[group.index], group.chunk_tokens, group.reads_all)
            for group in self._groups.offloaded
        ]
        has_host = bool(self._config.cpu_bytes)
        return look_up(len(token_ids), groups, self._manager, has_host=has_host)

    # ---- on the engine's thread ----

    def clear(self, tier: str) -> Iterator[str | None]:
        self._transfers.mark_stale()
        if tier in ("", HOST):
            self._manager.reset_cache()
        if tier != HOST and self._spec.io is not None:
            self._spec.empty(self._manager, tier)
            while self._spec.io.outcome is None:
                yield None
            yield self._spec.io.outcome
        yield ""
