"""Settings of the Redis backend: the URL taken apart, secrets, TLS. Nothing here opens a socket."""

import re
import ssl
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import msgspec

from kvoffload.backends.redis.channel import Address
from kvoffload.backends.redis.secrets import (
    Weakness,
    exposed_files,
    read_file,
    read_password,
    weak_password,
)
from kvoffload.config import ByteSize
from kvoffload.errors import HIDDEN, ConfigError, shown

_SCHEMES = ("redis", "rediss", "unix")
_KINDS = ("", "sentinel", "cluster")
_TEN_YEARS_S = 10 * 365 * 86400.0
"""A longer life overflows what servers accept, and says "for ever" where none is meant."""
_REMEDY = (
    "write redis://host:6379/0, rediss://host, unix:///run/redis.sock?db=0, "
    "redis+sentinel://host1:26379,host2/service or redis+cluster://host1:7000,host2:7000"
)
_ESCAPES = (
    "there is an @ behind the host: write / ? # @ of a user name or password as %2F %3F %23 %40, "
    "or better, name them in username and password_file"
)
_NO_TLS = "is for TLS, and the URL means none: write rediss://, or leave this setting out"
_HOST = re.compile(r"(\[[^][@\s]+\]|[^][:@\s]+)(?::([0-9]{0,5}))?")
_DATABASE = re.compile(r"[0-9]{1,9}")


class RedisOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to reach the servers, and how long to wait for them.

    Secrets are best left out of ``url``: a password comes from the environment variable or the file
    named here, read again at each connect, and never shows in logs or errors.
    """

    url: str
    """``redis://``, ``rediss://`` (TLS), ``unix://``; ``redis+sentinel://``, ``redis+cluster://``
    and the same with ``rediss``."""
    username: str = ""
    password_env: str = ""
    password_file: str = ""
    sentinel_username: str = ""
    sentinel_password_env: str = ""
    sentinel_password_file: str = ""
    ca_file: str = ""
    """Certificates trusted for TLS; default: the system's. The host name is always checked."""
    cert_file: str = ""
    """This client's certificate, for servers that ask for one; its key is in ``key_file``."""
    key_file: str = ""
    secret_file: str = ""
    """Authenticate values with keyed BLAKE3 under this file's content (at least 32 bytes): chunks
    not written by someone who has it are misses. Needs the ``blake3`` extra."""
    connections: int = 4
    """Data connections to each server; one more serves lookups."""
    max_inflight_bytes: ByteSize = ByteSize(2 << 20)
    """Bytes of chunks asked for or being sent at once, to each server; two chunks always may."""
    ttl_s: float = 86400.0
    """A chunk neither written nor read for so long is forgotten by the server."""
    connect_timeout_s: float = 0.5
    timeout_s: float = 0.5
    """A connection on which replies are owed and nothing comes for so long is given up."""
    min_bandwidth: ByteSize = ByteSize(4 << 20)
    """Bytes a second: a connection that moves less counts as hung."""
    lookup_timeout_s: float = 0.25
    """So long "is this chunk here?" may stay unanswered; then it is not."""
    present_s: float = 5.0
    """How long "it is here" is believed."""
    absent_s: float = 1.0
    """How long "it is not here" is believed."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in (
            "ttl_s", "connect_timeout_s", "timeout_s", "lookup_timeout_s", "present_s", "absent_s",
        ):  # fmt: skip
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "must be a positive number of seconds")
        if not 0.001 <= self.ttl_s <= _TEN_YEARS_S:
            raise ConfigError("ttl_s", self.ttl_s, "must be 0.001 seconds to ten years")
        if not 1 <= self.connections <= 64:
            raise ConfigError("connections", self.connections, "must be 1 to 64")
        if self.max_inflight_bytes < 1 << 20:
            raise ConfigError("max_inflight_bytes", self.max_inflight_bytes, "must be >= 1 MiB")
        if self.key_file and not self.cert_file:
            raise ConfigError("key_file", self.key_file, "goes with cert_file, which is not set")
        if not parse_url(self.url).tls:
            for name in ("ca_file", "cert_file", "key_file"):
                if getattr(self, name):
                    raise ConfigError(name, getattr(self, name), _NO_TLS)

    def __repr__(self) -> str:
        return f"RedisOptions(url={redacted(self.url)!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """The same for rich, which would print every field."""
        return [("url", redacted(self.url))]


class Target(NamedTuple):
    """What a URL says."""

    kind: str
    """Empty (one server), ``sentinel`` or ``cluster``."""
    tls: bool
    addresses: tuple[Address, ...]
    db: int
    service: str
    username: str
    password: str

    def __repr__(self) -> str:
        return f"Target({', '.join(map(str, self.addresses))})"


def redacted(url: str) -> str:
    """Where the URL leads, for people to read: no user, password or query; a wrong one's scheme."""
    try:
        target = _parse(url)
    except ValueError:
        return str(shown(url)) if "://" in url else HIDDEN
    service = f"/{target.service}" if target.service else ""
    return f"{url.partition('://')[0]}://{','.join(map(str, target.addresses))}{service}"


def parse_url(url: str) -> Target:
    """Take a URL apart.

    Raises:
        ConfigError: it is none of ours; the message shows nothing of it but the scheme.
    """
    try:
        return _parse(url)
    except ValueError as error:
        remedy = str(error)
    raise ConfigError("url", redacted(url), remedy)


def _parse(url: str) -> Target:
    """Take a URL apart by hand: the library's own errors quote what they cannot read."""
    name, mark, rest = url.partition("://")
    scheme, _, kind = name.lower().partition("+")
    if not mark or scheme not in _SCHEMES or kind not in _KINDS:
        raise ValueError(_REMEDY)
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    behind = rest[len(authority) :]
    if "@" in behind:
        raise ValueError(_ESCAPES)
    userinfo, _, hosts = authority.rpartition("@")
    username, _, password = (unquote(part) for part in userinfo.partition(":"))
    path, _, query = behind.partition("?")
    settings = parse_qsl(query, keep_blank_values=True)
    if "#" in behind or (query and [setting for setting, _ in settings] != ["db"]):
        raise ValueError(_REMEDY)
    if scheme == "unix":
        if kind or hosts or not path:
            raise ValueError(_REMEDY)
        addresses: tuple[Address, ...] = (Address("", 0, unquote(path)),)
        service, db = "", "0"
    else:
        default = 26379 if kind == "sentinel" else 6379
        addresses = tuple(_address(host, default) for host in hosts.split(","))
        service, db = _path(path, kind)
    db = dict(settings).get("db", db)
    if not kind and len(addresses) != 1:
        raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    if kind == "cluster" and db != "0":
        raise ValueError("a cluster has database 0 only")
    if not _DATABASE.fullmatch(db):
        raise ValueError("the database, behind the host, is a number")
    return Target(kind, scheme == "rediss", addresses, int(db), service, username, password)


def _path(path: str, kind: str) -> tuple[str, str]:
    path = path.strip("/")
    if kind != "sentinel":
        return "", path or "0"
    service, _, db = path.partition("/")
    if not service:
        raise ValueError("the path names the master's service: redis+sentinel://host/mymaster")
    return unquote(service), db or "0"


def _address(text: str, default_port: int) -> Address:
    found = _HOST.fullmatch(text)
    if found is None:
        raise ValueError(f"a host is name:port or [IPv6 address]:port; {_REMEDY}")
    port = int(found[2] or 0)
    if port > 65535:
        raise ValueError("a port is at most 65535")
    return Address(found[1].strip("[]").lower(), port or default_port)


class Access:
    """How to introduce oneself to a server: who, with which password, under which TLS."""

    def __init__(self, options: RedisOptions, target: Target) -> None:
        self.db = target.db
        self.username = options.username or target.username
        self.sentinel_username = options.sentinel_username
        self.tls = _context(options) if target.tls else None
        self._password = target.password
        self._options = options
        self.password()  # a secret that cannot be read is an error at start
        self.sentinel_password()

    def password(self) -> str:
        """Read the password, anew each time: it may have been changed.

        Raises:
            ConfigError: its file or variable is not there, or empty.
        """
        options = self._options
        named = read_password("password", options.password_env, options.password_file)
        return named or self._password

    def sentinel_password(self) -> str:
        """The password for Sentinels; by default they have none."""
        options = self._options
        return read_password(
            "sentinel_password", options.sentinel_password_env, options.sentinel_password_file
        )

    def weaknesses(self) -> list[Weakness]:
        """What is wrong with the secrets that is no reason to refuse them."""
        found = []
        if self._password:
            problem = "the URL has a password: ps and logs of the command line show it"
            found.append(Weakness(problem, "write it into a file, and name that in password_file"))
        found += weak_password("password", self.password())
        found += weak_password("Sentinels' password", self.sentinel_password())
        names = ("password_file", "sentinel_password_file", "secret_file", "key_file")
        return found + exposed_files({name: getattr(self._options, name) for name in names})


def _context(options: RedisOptions) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.ca_file or None)
    except OSError as error:  # as ssl.SSLError is
        raise ConfigError("ca_file", options.ca_file, f"cannot be used: {error}") from error
    if options.cert_file:
        read_file("cert_file", options.cert_file)
        if options.key_file:
            read_file("key_file", options.key_file)
        try:
            # An empty password: OpenSSL would ask the terminal for that of an encrypted key.
            context.load_cert_chain(options.cert_file, options.key_file or None, password="")
        except (OSError, ValueError) as error:
            remedy = f"cannot be used with key_file {options.key_file!r}: {error}"
            raise ConfigError("cert_file", options.cert_file, remedy) from error
    return context
