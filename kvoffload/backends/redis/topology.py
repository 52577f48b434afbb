"""The server of a key: a single server, the master that Sentinels name, or a cluster's slot table.

A topology returns :class:`~kvoffload.backends.redis.node.Node` objects. Discovery runs in the
background, at most twice a second; no load or store waits for it.
"""

import logging
import threading
from collections.abc import Collection, Sequence
from itertools import takewhile

from kvoffload.backends.log_rate import Throttle
from kvoffload.backends.redis.background import Background
from kvoffload.backends.redis.connection import Address
from kvoffload.backends.redis.discovery import (
    NUM_SLOTS,
    REFRESH_EVERY_S,
    Slots,
    find_slots,
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

    Any thread may call the methods. What Sentinels or a cluster tell comes in the background.
    """

    def __init__(self, access: Access, count: Count) -> None:
        self._access, self._count = access, count
        self._seeds = access.target.addresses
        self._changing = threading.Lock()
        self._nodes: dict[Address, Node] = {}
        self._slots: list[Node | None] = [None] * NUM_SLOTS
        self._known = threading.Event()
        self.is_failing = False
        """Whether no server told at the last question who has which slots."""
        self._is_closed = self._warned = False
        self._moves = Throttle(log)
        self._refresher = Background("kvoffload-redis-slots", self._refresh, lambda: None)
        self._is_cluster = access.target.kind == "cluster"
        if not access.target.kind:
            self._refresh()

    @property
    def is_known(self) -> bool:
        """Whether the servers are known, or cannot be."""
        return self._known.is_set()

    def wait(self) -> None:
        """Ask who the servers are, and wait for the answer, at most for two connect timeouts."""
        if not self.is_known:
            self._refresher.wake()
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
            node = Node(address, self._access, self._count, self._refresher.wake)
            self._nodes[address] = node
            if self._is_closed:
                node.close()
        return self._nodes[address]

    def _refresh(self) -> float:
        with self._changing:
            healthy = [address for address, node in self._nodes.items() if not node.is_open]
        servers = takewhile(lambda _: not self._is_closed, dict.fromkeys([*healthy, *self._seeds]))
        try:
            self._adopt(find_slots(self._access, servers))
        except Exception as error:  # no error ends the refresher
            if not (self.is_failing or self._is_closed):  # log the first failed round only
                log.warning("redis: %s", error)
            self.is_failing = True
            self._known.set()  # that they cannot be is an answer, too: no request waits on
            self._refresher.wake()  # ask again after the pause
            return 2 * REFRESH_EVERY_S
        if self.is_failing:
            log.warning("redis: the servers are known again")
        self.is_failing = False
        self._known.set()
        return REFRESH_EVERY_S

    def _adopt(self, slots: Slots) -> None:
        with self._changing:
            table: list[Node | None] = [None] * NUM_SLOTS
            for start, stop, address in slots:
                table[start : stop + 1] = [self._node_at(address)] * (stop + 1 - start)
            self._slots = table
            used = {address for _, _, address in slots}
            gone = [address for address in self._nodes if address not in used]
            for address in gone:
                self._nodes.pop(address).close()
        if gone:  # one that was left alone never comes back: what follows is told in its place
            text = "redis: the store has left %s; it is at %s"
            self._moves.warning(text, _named(gone), _named(used))


def _named(addresses: Collection[Address]) -> str:
    shown = ", ".join(sorted(map(str, addresses))[:_SHOWN_SERVERS])
    more = len(addresses) - _SHOWN_SERVERS
    return f"{shown} and {more} more" if more > 0 else shown
