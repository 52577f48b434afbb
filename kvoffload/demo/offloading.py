"""What the engine asks of offloading: LocalConnector's verbs, and their answers without it."""

from collections.abc import Iterable, Sequence
from typing import Any

from kvoffload.connectors.local import LoadOutcome, LocalConnector
from kvoffload.core.request import Request


class NoOffloading:
    """Nothing is kept beyond device memory; LocalConnector describes the verbs."""

    def request_queued(self, request: Request) -> None:
        """Nothing is kept for it."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return 0

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[Sequence[int], ...], num_external_tokens: int
    ) -> None:
        """Never called: nothing matches."""

    def poll(self) -> list[LoadOutcome]:
        return []

    def before_forward(self, block_ids: Iterable[int]) -> None:
        """No transfer touches any block."""

    def after_forward(
        self, request: Request, block_ids: tuple[Sequence[int], ...], num_computed_tokens: int
    ) -> None:
        """Nothing to store to."""

    def request_preempted(self, request: Request) -> bool:
        return False

    def request_finished(self, request: Request) -> bool:
        return False

    def flush(self) -> None:
        """Do nothing: no transfer is in flight."""

    def close(self) -> None:
        """Do nothing: there are no tiers."""

    def stats(self) -> dict[str, Any]:
        return {}


Connector = LocalConnector | NoOffloading
