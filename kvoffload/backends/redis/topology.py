"""The server of a key: a single server, the master that Sentinels name, or a cluster's slot table.

A topology returns :class:`~kvoffload.backends.redis.node.Node` objects. Discovery runs in the
background, at most twice a second; no load or store waits for it.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from redis.crc import key_slot

from kvoffload.backends.redis.channel import Address
from kvoffload.backends.redis.discovery import (
    NUM_SLOTS,
    REFRESH_EVERY_S,
    SentinelResolver,
    Slots,
    fetch_slots,
    parse_redirect,
)
from kvoffload.backends.redis.node import Node, Resolve
from kvoffload.backends.redis.options import Access
from kvoffload.backends.redis.resp import ServerError

log = logging.getLogger(__name__)

_SHOWN_SERVERS = 5


class SingleServer:
    """One server at a time: always the same one, or the master that Sentinels name.

    :class:`Cluster` has the same methods. They run on the I/O loop's thread.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._warned = False

    async def ready(self) -> None:
        """Wait until the slot table is known, at most the connect timeout."""

    def node(self, key: bytes) -> Node | None:
        """Return the server of a key, or None while it is unknown."""
        return self._node

    def nodes(self) -> Iterable[Node]:
        return (self._node,)

    def redirect(self, error: ServerError) -> tuple[Node, bool] | None:
        """Return the server that a MOVED or ASK names, and whether it needs ASKING first."""
        if not self._warned:
            self._warned = True
            log.error("this Redis is a cluster: write redis+cluster:// (%s)", error.code)
        return None

    def close(self) -> list[asyncio.Task[None]]:
        return self._node.close()


class Cluster:
    """A cluster's slot table, with one node for each master.

    Args:
        access: Has the seeds, the servers to ask first.
        make_node: Makes the node for an address; the second argument marks the table as stale.
    """

    def __init__(
        self, access: Access, make_node: Callable[[Address, Callable[[], None]], Node]
    ) -> None:
        self._access = access
        self._seeds = access.target.addresses
        self._make_node = make_node
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Node | None] = [None] * NUM_SLOTS
        self._known = asyncio.Event()
        self._stale = asyncio.Event()
        self._failing = False
        self._stale.set()
        self._refresher = asyncio.get_running_loop().create_task(self._refresh())

    async def ready(self) -> None:
        if not self._known.is_set() and not self._failing:
            with contextlib.suppress(TimeoutError):
                timeout_s = 2 * self._access.options.connect_timeout_s
                await asyncio.wait_for(self._known.wait(), timeout_s)

    def node(self, key: bytes) -> Node | None:
        node = self._slots[key_slot(key)]
        if node is None:
            self._stale.set()
        return node

    def nodes(self) -> Iterable[Node]:
        return list(self._nodes.values())

    def redirect(self, error: ServerError) -> tuple[Node, bool] | None:
        """Follow a redirect to a server of the table or of the URL; a MOVED corrects the table.

        A server known from an error reply alone gets no connection, and so no password. The
        refresher fetches the table again.
        """
        try:
            slot, address = parse_redirect(error)
        except ValueError as wrong:
            log.debug("redis cluster: %s", wrong)
            self._stale.set()
            return None
        if address not in self._nodes and address not in self._seeds:
            log.debug("redis cluster: a redirect names %s, which no table has yet", address)
            self._stale.set()
            return None
        node = self._node_at(address)
        if error.code == "MOVED":
            self._slots[slot] = node
            self._stale.set()
        return node, error.code == "ASK"

    def close(self) -> list[asyncio.Task[None]]:
        self._refresher.cancel()
        return [self._refresher, *(task for node in self._nodes.values() for task in node.close())]

    def _node_at(self, address: Address) -> Node:
        if address not in self._nodes:
            self._nodes[address] = self._make_node(address, self._stale.set)
        return self._nodes[address]

    async def _refresh(self) -> None:
        while True:
            await self._stale.wait()
            self._stale.clear()
            slots = await self._fetch()
            if slots is not None and self._failing:
                log.warning("redis cluster: a slot table is known again")
            self._failing = slots is None
            if slots is None:
                self._stale.set()  # no server answered: ask again after the pause
            else:
                self._adopt(slots)
                self._known.set()
            await asyncio.sleep(REFRESH_EVERY_S * (2 if self._failing else 1))

    async def _fetch(self) -> Slots | None:
        healthy = [a for a, node in self._nodes.items() if not node.is_open]
        failures: list[str] = []
        for address in dict.fromkeys([*healthy, *self._seeds, *self._nodes]):
            try:
                if slots := await fetch_slots(address, self._access):
                    return slots
                failures.append(f"{address}: a table without servers")
            except Exception as error:  # no error ends the refresher
                failures.append(f"{address}: {str(error) or type(error).__name__}")
        if not self._failing:  # log the first failed round only
            some = "; ".join(failures[:_SHOWN_SERVERS])
            log.warning("redis cluster: no server gives a slot table: %s", some)
        return None

    def _adopt(self, slots: Slots) -> None:
        table: list[Node | None] = [None] * NUM_SLOTS
        for start, stop, address in slots:
            table[start : stop + 1] = [self._node_at(address)] * (stop + 1 - start)
        self._slots = table
        used = {address for _, _, address in slots}
        for address in [a for a in self._nodes if a not in used]:
            self._nodes.pop(address).close()


Topology = SingleServer | Cluster


def open_topology(access: Access, counters: Counter[str]) -> Topology:
    """Make the topology of a URL. Call it on the I/O loop's thread."""
    target = access.target
    if target.kind == "cluster":
        return Cluster(
            access,
            lambda address, on_trouble: Node(_fixed(address), access, counters, on_trouble),
        )
    resolve = SentinelResolver(access) if target.kind == "sentinel" else _fixed(target.addresses[0])
    return SingleServer(Node(resolve, access, counters, lambda: None))


def _fixed(address: Address) -> Resolve:
    async def resolve() -> Address:
        return address

    return resolve
