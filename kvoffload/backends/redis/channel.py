"""Connected, non-blocking sockets, plain or under TLS."""

import asyncio
import ipaddress
import socket
import ssl
from functools import partial
from typing import Any, NamedTuple

from kvoffload.backends.blocking_pool import run_once


class Address(NamedTuple):
    """The address of a server: a host and a port, or the path of a Unix socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


async def open_socket(address: Address, context: ssl.SSLContext | None) -> socket.socket:
    """Connect, under TLS if ``context`` is given; raises OSError. The caller sets the deadline."""
    loop = asyncio.get_running_loop()
    failure: OSError = OSError(f"no address for {address}")
    for family, target in await _resolve(address):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, target)
            if context is None:
                return sock
            tls = context.wrap_socket(
                sock, server_hostname=address.host, do_handshake_on_connect=False
            )
            sock = tls
            await _agree_on_keys(tls)
            return tls
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


async def _agree_on_keys(sock: ssl.SSLSocket) -> None:
    """Do the TLS handshake, which checks the server's certificate and name."""
    loop, descriptor = asyncio.get_running_loop(), sock.fileno()
    while True:
        ready = asyncio.Event()
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            loop.add_reader(descriptor, ready.set)
        except ssl.SSLWantWriteError:
            loop.add_writer(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(descriptor)
            loop.remove_writer(descriptor)


async def _resolve(address: Address) -> list[tuple[int, Any]]:
    """Return address families and socket addresses. An IP address needs no lookup."""
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    try:
        version = ipaddress.ip_address(address.host).version
    except ValueError:
        # On a thread of its own, because a name lookup may hang. Checksums for another server and
        # the end of the process must not wait for it.
        found = await run_once(
            partial(socket.getaddrinfo, address.host, address.port, type=socket.SOCK_STREAM)
        )
        return [(family, target) for family, _, _, _, target in found]
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    return [(family, (address.host, address.port))]
