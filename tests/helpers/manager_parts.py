"""A manager with stores that are plain sets, and what tests of it do over and over."""

from kvoffload import registry
from kvoffload.config import KNOWN_HINTS
from kvoffload.metrics.samples import as_data
from kvoffload.offload.base import ReqContext, make_offload_key
from kvoffload.offload.host_cache import HostCache
from kvoffload.offload.manager import Tier, TieredOffloadingManager
from kvoffload.offload.tiers import Presence
from kvoffload.policies.tenant_order import TenantOrder, TenantShares


def keys(prompt, count):
    return [make_offload_key(f"{prompt}{i}".encode() * 8, 0) for i in range(count)]


class Store(Presence):
    is_up = True

    def __init__(self, held=()):
        self.held, self.removals = set(held), []

    def holds(self, key):
        return key in self.held

    def forget(self, gone):
        self.held.difference_update(gone)

    def take_removals(self):
        taken, self.removals = self.removals, []
        return taken


def new_manager(slots=10, stores=(), policy="lru", **settings):
    """Make a manager over tiers named ``tier0`` and so on; all hints are allowed by default."""
    tiers = [Tier(f"tier{i}", store) for i, store in enumerate(stores)]
    settings = {"client_hints": KNOWN_HINTS, **settings}
    share = settings.pop("tenant_share", None)
    tenants = None if share is None else TenantShares(share)
    if isinstance(policy, str):
        policy = registry.load(registry.POLICIES, policy, "policy")(slots)
    order = policy if tenants is None else TenantOrder(policy, tenants)
    host = HostCache(slots, order, settings.pop("slot_bytes", 1))
    if tenants is not None:
        host.tell_tenants_apart(tenants)
    return TieredOffloadingManager(host, tiers, **settings)


def figures(manager):
    """Return all metrics of a manager as plain data."""
    return as_data(manager.figures.samples())


def put(manager, wanted, hint=None, name="r"):
    context = ReqContext(name, {"kvoffload": hint} if hint else None)
    output = manager.prepare_store(wanted, context)
    manager.complete_store(output.keys_to_store, context)
    return output


def write_through(manager):
    """Write to the tiers all that waits to be written, and well."""
    while writes := manager.take_transfers():
        for each in writes:
            manager.complete(each, [True] * len(each.keys))
