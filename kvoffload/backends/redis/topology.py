"""Which server has a key: one server, the master Sentinels name, or a cluster's slot table.

A topology gives :class:`~kvoffload.backends.redis.node.Node` objects; it knows nothing of chunks.
Discovery runs in the background, at most twice a second, and never on anybody's way.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from kvoffload.backends.redis.channel import Address
from kvoffload.backends.redis.discovery import REFRESH_EVERY_S, SentinelResolver, fetch_slots
from kvoffload.backends.redis.node import Node, Resolve
from kvoffload.backends.redis.options import Access, RedisOptions, Target
from kvoffload.backends.redis.resp import ServerError
from kvoffload.backends.redis.slots import NUM_SLOTS, Slots, parse_redirect, slot_of

log = logging.getLogger(__name__)

_SHOWN_SERVERS = 5


class Topology(Protocol):
    """Finds the server for a key. On the I/O loop's thread, but for :meth:`shut`."""

    async def ready(self) -> None:
        """Wait until there is something to route by; at most the connect timeout."""
        ...

    def node(self, key: bytes) -> Node | None:
        """The server in charge of a key, or None while nobody is known to be."""
        ...

    def nodes(self) -> Iterable[Node]:
        """Every server known."""
        ...

    def redirect(self, error: ServerError) -> tuple[Node, bool] | None:
        """Where a MOVED or ASK points to, and whether the command there must begin with ASKING."""
        ...

    def shut(self, key: bytes) -> bool:
        """Whether the key's server is being left alone; quick, on any thread."""
        ...

    def close(self) -> list[asyncio.Task[None]]:
        """Drop everything; returns what still has to come to its end."""
        ...


class Single:
    """One server at a time: always the same one, or the one Sentinels say is the master."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._said = False

    async def ready(self) -> None:
        """See :class:`Topology`."""

    def node(self, key: bytes) -> Node | None:
        """See :class:`Topology`."""
        return self._node

    def nodes(self) -> Iterable[Node]:
        """See :class:`Topology`."""
        return (self._node,)

    def redirect(self, error: ServerError) -> tuple[Node, bool] | None:
        """A single server that redirects is part of a cluster; the URL should have said so."""
        if not self._said:
            self._said = True
            log.error("this Redis is a cluster: write redis+cluster:// (%s)", error.code)
        return None

    def shut(self, key: bytes) -> bool:
        """See :class:`Topology`."""
        return self._node.is_open

    def close(self) -> list[asyncio.Task[None]]:
        """See :class:`Topology`."""
        return self._node.close()


class Cluster:
    """A cluster's slot table, one node for each master.

    Args:
        seeds: servers to ask first.
        make_node: makes the node for an address.
        ask: fetches the slot table from one server; raises OSError.
        timeout_s: how long :meth:`ready` waits.
    """

    def __init__(
        self,
        seeds: Iterable[Address],
        make_node: Callable[[Address], Node],
        ask: Callable[[Address], Coroutine[Any, Any, Slots]],
        timeout_s: float,
    ) -> None:
        self._seeds = list(seeds)
        self._make_node = make_node
        self._ask = ask
        self._timeout_s = timeout_s
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Node | None] = [None] * NUM_SLOTS
        self._loop = asyncio.get_running_loop()
        self._known = asyncio.Event()
        self._stale = asyncio.Event()
        self._failing = False
        self._stale.set()
        self._refresher = self._loop.create_task(self._refresh())

    async def ready(self) -> None:
        """See :class:`Topology`."""
        if not self._known.is_set() and not self._failing:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._known.wait(), self._timeout_s)

    def node(self, key: bytes) -> Node | None:
        """See :class:`Topology`."""
        node = self._slots[slot_of(key)]
        if node is None:
            self._stale.set()
        return node

    def nodes(self) -> Iterable[Node]:
        """See :class:`Topology`."""
        return list(self._nodes.values())

    def redirect(self, error: ServerError) -> tuple[Node, bool] | None:
        """See :class:`Topology`. A MOVED also corrects the table.

        Only servers of the table and of the URL are followed to: an address known from nothing but
        an error reply gets no connection, and so no password. The table is asked for again.
        """
        try:
            slot, address = parse_redirect(error)
        except ValueError as wrong:
            log.debug("redis cluster: %s", wrong)
            self._stale.set()
            return None
        if address not in self._nodes and address not in self._seeds:
            log.debug("redis cluster: redirected to %s, which is in no table yet", address)
            self._stale.set()
            return None
        node = self._node_at(address)
        if error.code == "MOVED":
            self._slots[slot] = node
            self._stale.set()
        return node, error.code == "ASK"

    def shut(self, key: bytes) -> bool:
        """See :class:`Topology`."""
        node = self._slots[slot_of(key)]
        return node.is_open if node is not None else self._failing

    def troubled(self) -> None:
        """A node behaves as if the table were old."""
        self._stale.set()

    def close(self) -> list[asyncio.Task[None]]:
        """See :class:`Topology`."""
        self._refresher.cancel()
        return [self._refresher, *(task for node in self._nodes.values() for task in node.close())]

    def _node_at(self, address: Address) -> Node:
        if address not in self._nodes:
            self._nodes[address] = self._make_node(address)
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
                self._stale.set()  # nobody answered: ask again after the pause
            else:
                self._adopt(slots)
                self._known.set()
            await asyncio.sleep(REFRESH_EVERY_S * (2 if self._failing else 1))

    async def _fetch(self) -> Slots | None:
        healthy = [a for a, node in self._nodes.items() if not node.is_open]
        said: list[str] = []
        for address in dict.fromkeys([*healthy, *self._seeds, *self._nodes]):
            try:
                if slots := await self._ask(address):
                    return slots
                said.append(f"{address}: a table without servers")
            except Exception as error:  # whatever it is, the refresher goes on
                said.append(f"{address}: {str(error) or type(error).__name__}")
        if not self._failing:  # said once, not with every try
            some = "; ".join(said[:_SHOWN_SERVERS])
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


def open_topology(
    target: Target,
    options: RedisOptions,
    access: Access,
    counters: Counter[str],
    restarted: Callable[[], None],
) -> Topology:
    """Make the topology that a URL asks for; on the I/O loop's thread."""
    if target.kind == "cluster":

        def make_node(address: Address) -> Node:
            return Node(_always(address), access, options, counters, restarted, cluster.troubled)

        def ask(address: Address) -> Coroutine[Any, Any, Slots]:
            return fetch_slots(address, options, access)

        cluster = Cluster(target.addresses, make_node, ask, 2 * options.connect_timeout_s)
        return cluster
    if target.kind == "sentinel":
        resolve: Resolve = SentinelResolver(target, options, access)
    else:
        resolve = _always(target.addresses[0])
    return Single(Node(resolve, access, options, counters, restarted, lambda: None))


def _always(address: Address) -> Callable[[], Coroutine[Any, Any, Address]]:
    async def resolve() -> Address:
        return address

    return resolve
