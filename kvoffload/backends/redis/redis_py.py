"""redis-py as the control plane: discovery and administration, with deadlines and no retries.

Left to its defaults redis-py tries a dead server for about a minute; nothing here does.
"""

from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvoffload.backends.redis.channel import Address
from kvoffload.backends.redis.options import Access, RedisOptions


def client_options(options: RedisOptions, access: Access, timeout_s: float) -> dict[str, Any]:
    """The keyword arguments that make a redis-py client behave, without any credentials."""
    arguments: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,  # asks no HELLO of a user who may not say it
    }
    if access.tls is not None:
        arguments |= {
            "ssl": True,
            "ssl_check_hostname": True,
            "ssl_ca_certs": options.ca_file or None,
            "ssl_certfile": options.cert_file or None,
            "ssl_keyfile": options.key_file or None,
        }
    return arguments


def control_client(
    address: Address, options: RedisOptions, access: Access, timeout_s: float
) -> Redis:
    """A redis-py client for one server; whoever makes it closes it."""
    arguments = client_options(options, access, timeout_s)
    arguments |= {
        "db": access.db,
        "username": access.username or None,
        "password": access.password() or None,
    }
    if address.path:
        arguments["unix_socket_path"] = address.path
    return Redis(host=address.host, port=address.port, **arguments)
