"""Whether a manager's tables agree with each other; O(host slots)."""

from collections import Counter
from itertools import chain

from kvoffload.offload.extents import ExtentCache
from kvoffload.offload.orders_by_size import OrdersBySize, split


def check(owner):
    """Fail if a manager, or that of a connector, contradicts itself."""
    manager = getattr(owner, "_manager", owner)
    host, queue = manager._host, manager.waiting
    check_host(host)
    check_claims(host, queue.claims, queue.requests.values())
    check_retirement(manager._retirement)


def check_host(host):
    idle, order = host.evictable, host.order
    uses = Counter(_uses(host))
    moving = {*host.incoming, *host.fetching}
    assert _slots_add_up(host, uses), "every slot is in exactly one place"
    assert len(order) == len(idle), "the policy orders exactly the evictable chunks"
    assert all(key in order for key in idle), "evictable chunks are in the order"
    assert _orders_leave_out(host.order, [key for key in idle if key in host.claims])
    assert idle.keys().isdisjoint(host.pinned), "a pinned chunk is not evictable"
    assert host._more_uses.keys() <= host.pinned.keys(), "chunks in use are pinned"
    assert {*idle, *host.pinned, *host.incoming} >= marked(host.order), "a priority of no chunk"
    if host._tenants is not None:
        assert host._tenants.of.keys() == {*idle, *host.pinned, *moving}, "each chunk has a tenant"
    assert host.turns <= uses, "only chunks that take turns share a slot"
    assert all(uses[slot] == max(1, host.turns[slot]) for slot in uses)


def _uses(host):
    """List the slots of all chunks, from all places they may be in."""
    places = [
        host.evictable.values(),
        host.pinned.values(),
        host.incoming.values(),
        host.fetching.values(),
        (orphan.slot for orphan in host._orphans.values()),
        (slot for slot, uses in host._abandoned.items() for key in uses if key is None),
    ]
    return list(chain.from_iterable(places))


def _slots_add_up(host, uses):
    if not isinstance(host, ExtentCache):
        return sorted([*host._free, *uses]) == list(host._slots)
    for size in host._sizes:
        if size.num_free != sum(map(len, size.free.values())):
            return False
        if size.num_extents != sum(owner is size for owner in host._owner):
            return False
    free = [slot for size in host._sizes for slots in size.free.values() for slot in slots]
    owned = [
        extent * host._extent_rows + i * owner.rows
        for extent, owner in enumerate(host._owner)
        if owner is not None
        for i in range(owner.per_extent)
    ]
    unowned = [extent for extent, owner in enumerate(host._owner) if owner is None]
    return (
        sorted([*free, *uses]) == sorted(owned)
        and sorted(host._unowned) == unowned[host._first_extent :]
        and host._key_in == {slot: key for key, slot in host.ready()}
    )


def _orders_leave_out(order, claimed):
    """Whether just these chunks are kept, and the policy orders none of them."""
    if isinstance(order, OrdersBySize):
        parts = split(claimed, order._order_of)
        return all(_orders_leave_out(each, parts.get(each, ())) for each in order._rows)
    return order.num_kept == len(claimed) and not any(key in order.normal for key in claimed)


def marked(order):
    """Return the chunks that have a priority other than 0."""
    if isinstance(order, OrdersBySize):
        return set().union(*map(marked, order._rows))
    return set(order._priorities._priority) if order._priorities is not None else set()


def check_claims(host, claims, requests):
    uses = Counter()
    for request in (*requests, *claims.leaving):
        uses.update(request.keys[: request.num_kept])
    held = host.bytes_of_all(list(uses))
    of_tenants = [tenant.held_bytes for tenant in claims.tenants.values()]
    assert uses.keys() == host.claims.keys(), "queued requests claim what is kept"
    for key in uses.keys() - claims.gone:
        assert host.is_ready(key) or host.is_coming(key), "a claimed chunk is gone, and not noted"
    assert claims.gone <= uses.keys(), "chunks that are gone have claims"
    assert not any(map(host.is_ready, claims.gone)), "gone chunks are not in host memory"
    assert {key: n - 1 for key, n in uses.items() if n > 1} == claims._more, "shared claims"
    assert held == claims.held_bytes, "the bytes of claimed chunks are counted"
    assert held <= claims.share_bytes, "claims keep to their share"
    if claims.too_large is None:
        assert max(of_tenants, default=0) <= claims._tenant_limit(), "a tenant keeps to its limit"
    assert claims._claimants == sorted(each for each in requests if each.num_kept)


def check_retirement(retirement):
    waited_for = retirement._in_flight
    assert not retirement._not_in_flight(waited_for), "no transfer is waited for that has ended"
    lists = {id(ended): len(ended.chunks) for ended in waited_for.values()}
    assert sum(lists.values()) == retirement._num_listed, "lists of ended requests are counted"
