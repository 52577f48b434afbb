"""What the engine asks of offloading, and the answer where there is none."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvoffload.connectors.local import LoadOutcome
from kvoffload.core.request import Request


class Connector(Protocol):
    """The verbs of :class:`kvoffload.connectors.local.LocalConnector` this engine uses.

    They are described there; the scheduler and the engine show when each is called.
    """

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> int | None: ...

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[Sequence[int], ...], num_external_tokens: int
    ) -> None: ...

    def poll(self) -> list[LoadOutcome]: ...

    def before_forward(self, block_ids: Iterable[int]) -> None: ...

    def after_forward(
        self, request: Request, block_ids: tuple[Sequence[int], ...], num_computed_tokens: int
    ) -> None: ...

    def request_preempted(self, request: Request) -> bool: ...

    def request_finished(self, request: Request) -> bool: ...

    def flush(self) -> object: ...

    def close(self) -> None: ...

    def stats(self) -> dict[str, Any]: ...


class NoOffloading:
    """Nothing is kept beyond device memory."""

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
