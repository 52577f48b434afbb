"""The servers that may be sent a password: those of the URL, and those that it implies.

Slot tables and Sentinels name servers, and the tier would send its password there. An attacker who
controls one of them must not choose an inner service of the engine's network.
"""

import ipaddress
from collections.abc import Iterable

from kvoffload.backends.redis.connection import Address
from kvoffload.errors import ConfigError

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_REMEDY = (
    "write names and networks with commas between: cache1.internal, *.cache.internal, 10.0.0.0/8"
)


class AllowedServers:
    """Checks the addresses that servers name.

    Without a list, every server is allowed that is neither loopback nor link-local. Those are
    allowed if a server of the URL is one.

    Args:
        seeds: The servers of the URL, which are always allowed.
        listed: The option ``servers``.

    Raises:
        ConfigError: The list is malformed.
    """

    def __init__(self, seeds: Iterable[Address], listed: str) -> None:
        self._seeds = frozenset(seeds)
        self._names: set[str] = set()
        self._networks: list[_Network] = []
        for word in filter(None, (word.strip().lower() for word in listed.split(","))):
            try:
                self._networks.append(ipaddress.ip_network(word))
            except ValueError:
                if not all(c.isalnum() or c in "-._*" for c in word) or word == "*":
                    raise ConfigError("servers", word, _REMEDY) from None
                self._names.add(word)
        self._is_listed = bool(self._names or self._networks)
        self._near = {kind for seed in self._seeds if (kind := _kind(seed.host))}

    def check(self, address: Address) -> Address:
        """Return an address that a server names; raises ValueError if it is not allowed."""
        if not self._admits(address):
            raise ValueError(f"{address} is no server of the URL, and servers does not allow it")
        return address

    def check_ip(self, address: Address, ip: str) -> None:
        """Check where the name of an address leads; raises OSError if it is not allowed."""
        kind = _kind(ip)
        if address in self._seeds:
            self._near.add(kind)  # the operator's own name server says so
        elif kind not in self._near and not (self._lists(address.host) or self._lists(ip)) and kind:
            raise ConnectionError(f"{address} leads to {ip}, which servers does not allow")

    def _admits(self, address: Address) -> bool:
        if address in self._seeds or self._lists(address.host):
            return True
        kind = _kind(address.host)
        return not self._is_listed and (not kind or kind in self._near)

    def _lists(self, host: str) -> bool:
        name = host.lower()
        if name in self._names:
            return True
        if any(each.startswith("*.") and name.endswith(each[1:]) for each in self._names):
            return True
        ip = _ip(host)
        return ip is not None and any(ip in network for network in self._networks)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def _kind(host: str) -> str:
    """Return ``loopback``, ``link-local``, or nothing for every other host."""
    ip = _ip(host)
    if ip is None:
        name = host.lower().rstrip(".")
        return "loopback" if name == "localhost" or name.endswith(".localhost") else ""
    if ip.is_loopback or ip.is_unspecified:
        return "loopback"
    return "link-local" if ip.is_link_local else ""
