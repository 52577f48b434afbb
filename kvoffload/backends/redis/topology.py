"""The server of a key: a single server, the master that Sentinels name, or a cluster's slot table.

A topology returns :class:`~kvoffload.backends.redis.node.Node` objects. Discovery runs in the
background, at most twice a second; no load or store waits for it.
"""

import logging
import threading
from collections.abc import Sequence

from kvoffload.backends.redis.background import Background
from kvoffload.backends.redis.connection import Address
from kvoffload.backends.redis.discovery import (
    NUM_SLOTS,
    REFRESH_EVERY_S,
    SentinelResolver,
    Slots,
    fetch_slots,
    key_slot,
    parse_redirect,
)
from kvoffload.backends.redis.node import Count, Node
from kvoffload.backends.redis.options import Access
from kvoffload.backends.redis.resp import ServerError

log = logging.getLogger(__name__)

_SHOWN_SERVERS = 5


class Topology:
    """The nodes of a URL, and the one of each slot: without a cluster, one has them all.

    Any thread may call the methods. A slot table comes in the background.
    """

    def __init__(self, access: Access, count: Count) -> None:
        self._access, self._count = access, count
        self._seeds = access.target.addresses
        self._changing = threading.Lock()
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Node | None] = [None] * NUM_SLOTS
        self._known = threading.Event()
        self._is_failing = self._is_closed = self._warned = False
        self._refresher = Background("kvoffload-redis-slots", self._refresh, lambda: None)
        self._is_cluster = access.target.kind == "cluster"
        if self._is_cluster:
            self._refresher.wake()
            return
        address = self._seeds[0]
        is_named = access.target.kind == "sentinel"
        resolve = SentinelResolver(access) if is_named else lambda: address
        self._nodes[address] = node = Node(resolve, access, count, lambda: None)
        self._slots = [node] * NUM_SLOTS
        self._known.set()

    @property
    def is_known(self) -> bool:
        """Whether the servers are known, or cannot be."""
        return self._known.is_set() or self._is_failing

    def wait(self) -> None:
        """Wait until the servers are known, at most for two connect timeouts."""
        if not self.is_known:
            self._known.wait(2 * self._access.options.connect_timeout_s)

    def node(self, tag: bytes) -> Node | None:
        """Return the server of a key's hash tag, or None while it is unknown."""
        node = self._slots[key_slot(tag) if self._is_cluster else 0]
        if node is None:
            self._refresher.wake()
        return node

    def nodes(self) -> Sequence[Node]:
        with self._changing:
            return list(self._nodes.values())

    def redirect(self, error: ServerError) -> tuple[Node, bool] | None:
        """Return the server that a MOVED or ASK names, and whether it needs ASKING first.

        It is a server of the table or of the URL. A MOVED corrects the table. A server known from
        an error reply alone gets no connection, and so no password.
        """
        if not self._is_cluster:
            if not self._warned:
                self._warned = True
                log.error("this Redis is a cluster: write redis+cluster:// (%s)", error.code)
            return None
        try:
            slot, address = parse_redirect(error)
        except ValueError as wrong:
            log.debug("redis cluster: %s", wrong)
            self._refresher.wake()
            return None
        with self._changing:
            if address not in self._nodes and address not in self._seeds:
                log.debug("redis cluster: a redirect names %s, which no table has yet", address)
                self._refresher.wake()
                return None
            node = self._node_at(address)
            if error.code == "MOVED":
                self._slots[slot] = node
                self._refresher.wake()
        return node, error.code == "ASK"

    def close(self) -> None:
        """End every connection; threads end soon."""
        self._refresher.close()
        with self._changing:
            self._is_closed = True
            for node in self._nodes.values():
                node.close()
        self._known.set()

    def join(self) -> None:
        """After :meth:`close`: wait for the threads."""
        self._refresher.join()
        for node in self._nodes.values():
            node.join()

    def _node_at(self, address: Address) -> Node:
        if address not in self._nodes:
            trouble = self._refresher.wake
            node = Node(lambda: address, self._access, self._count, trouble)
            self._nodes[address] = node
            if self._is_closed:
                node.close()
        return self._nodes[address]

    def _refresh(self) -> float:
        slots = self._fetch()
        if slots is not None and self._is_failing:
            log.warning("redis cluster: a slot table is known again")
        self._is_failing = slots is None
        if slots is None:
            self._refresher.wake()  # no server answered: ask again after the pause
            return 2 * REFRESH_EVERY_S
        self._adopt(slots)
        self._known.set()
        return REFRESH_EVERY_S

    def _fetch(self) -> Slots | None:
        with self._changing:
            healthy = [a for a, node in self._nodes.items() if not node.is_open]
            known = list(self._nodes)
        failures: list[str] = []
        for address in dict.fromkeys([*healthy, *self._seeds, *known]):
            if self._is_closed:
                return None
            try:
                return fetch_slots(address, self._access)
            except Exception as error:  # no error ends the refresher
                failures.append(f"{address}: {str(error) or type(error).__name__}")
        if not self._is_failing:  # log the first failed round only
            some = "; ".join(failures[:_SHOWN_SERVERS])
            log.warning("redis cluster: no server gives a slot table: %s", some)
        return None

    def _adopt(self, slots: Slots) -> None:
        with self._changing:
            table: list[Node | None] = [None] * NUM_SLOTS
            for start, stop, address in slots:
                table[start : stop + 1] = [self._node_at(address)] * (stop + 1 - start)
            self._slots = table
            used = {address for _, _, address in slots}
            for address in [a for a in self._nodes if a not in used]:
                self._nodes.pop(address).close()
