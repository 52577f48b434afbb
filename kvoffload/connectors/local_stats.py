"""The figures of an engine whose scheduler and worker share a process."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import msgspec

from kvoffload.connectors.builder import TieredOffloadingSpec
from kvoffload.metric_list import Sample, samples_of_manager, samples_of_worker
from kvoffload.offload.base import Manager
from kvoffload.transfer.engine import TransferEngine


class LocalStats:
    """Collects counters since the start, and what is resident now.

    Args:
        spec: has the I/O server and its tiers.
        manager: decides.
        worker: moves bytes.
        loaded_tokens: tokens loaded so far, by medium.
    """

    def __init__(
        self,
        spec: TieredOffloadingSpec,
        manager: Manager,
        worker: TransferEngine,
        loaded_tokens: Mapping[str, int],
    ) -> None:
        self._spec = spec
        self._manager = manager
        self._worker = worker
        self._loaded_tokens = loaded_tokens

    def samples(self) -> Iterator[Sample]:
        """Return the samples of all metrics, on any thread.

        Raises:
            RuntimeError: the engine's thread changed a dictionary while it was read.
        """
        return chain(
            samples_of_manager(self._manager.stats(), dict(self._loaded_tokens)),
            samples_of_worker(self._worker.figures()),
        )

    def collect(self) -> dict[str, Any]:
        """Return all figures as plain data.

        Host memory's ``capacity_chunks`` counts slots of ``slot_bytes``: rows, if chunks differ in
        size, of which a chunk takes several.
        """
        spec, tiers = self._spec, {}
        manager: dict[str, Any] = msgspec.to_builtins(self._manager.stats())
        for name, tier in spec.tiers.items():
            if usage := tier.usage:
                tiers[name] = {**usage._asdict(), "counters": dict(tier.counters)}
        return {
            "namespace": spec.namespace,
            "host": {
                **manager.pop("host"),
                "capacity_chunks": spec.num_slots,
                "slot_bytes": spec.slot_bytes,
            },
            "tiers": tiers,
            "loaded_tokens": dict(self._loaded_tokens),
            "manager": manager.pop("counters"),
            "transfers": dict(self._worker.counters),
            "worker": msgspec.to_builtins(self._worker.figures()),
            "copies": spec.copies,
            "io": spec.io.stats if spec.io else {},
            **manager,
        }
