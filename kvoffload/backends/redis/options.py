"""Settings of the Redis backend: options, URL, passwords, keys and TLS. No code opens a socket.

No error, log line or repr made here contains any part of a secret.
"""

import re
import ssl
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import msgspec

from kvoffload.backends.redis.allowed import AllowedServers
from kvoffload.backends.redis.connection import Address
from kvoffload.backends.secret_files import exposure, is_guessable, read_file, read_text
from kvoffload.config import ByteSize
from kvoffload.errors import HIDDEN, ConfigError, check_setting, shown
from kvoffload.extras import check_extra

MIN_PASSWORD_CHARS = 16
_SCHEMES = ("redis", "rediss", "unix")
_KINDS = ("", "sentinel", "cluster")
_TEN_YEARS_S = 10 * 365 * 86400.0
"""Servers refuse a much longer time to live, because it overflows."""
_REMEDY = (
    "write redis://host:6379/0, rediss://host, unix:///run/redis.sock?db=0, "
    "redis+sentinel://host1:26379,host2/service or redis+cluster://host1:7000,host2:7000"
)
_NO_PASSWORD = (
    "has a password, which ps and logs would show: write it into a file or an environment "
    "variable, and name that in password_file or password_env"
)
_ESCAPES = (
    "the part behind the host contains an @: a user name belongs in username, and a password in "
    "the file of password_file"
)
_NO_TLS = "needs TLS: write rediss:// in the URL, or leave this setting out"
_LINE_ENDS = "\r\n"
"""What a file has behind a password; one may begin or end with a space."""
KEY_CONTEXT = "kvoffload redis values v1"
"""Of the key, derived from ``secret_file``, that authenticates values."""
_HOST = re.compile(r"(\[[^][@\s]+\]|[^][:@\s]+)(?::([0-9]{0,5}))?")
_DATABASE = re.compile(r"[0-9]{1,9}")


class RedisOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Servers, credentials, deadlines and limits.

    A password belongs in the environment variable or the file named here; one in ``url`` is
    refused. The backend reads it again at each connect and never shows it in logs or errors.
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
    """Certificates trusted for TLS; default: the system's. TLS always checks the host name."""
    cert_file: str = ""
    """This client's certificate, for servers that require one; ``key_file`` has its key."""
    key_file: str = ""
    secret_file: str = ""
    """Authenticate values with keyed BLAKE3 under this file's content (at least 32 bytes). Chunks
    written without the secret are misses. Needs the ``blake3`` extra."""
    servers: str = ""
    """Names and networks of the servers that a slot table or a Sentinel may name, with commas
    between: ``*.cache.internal, 10.0.0.0/8``. Default: every server but loopback and link-local
    addresses, unless a server of the URL has one."""
    connections: int = 16
    """Data connections to each server, each with one chunk in flight; one more serves lookups. To a
    server with a round trip below half a millisecond, a load or a store uses two."""
    max_inflight_bytes: ByteSize = ByteSize(4 << 20)
    """Bytes of chunks in flight to each server; two chunks may always be in flight."""
    ttl_s: float = 86400.0
    """The server drops a chunk that was not written or read for so long."""
    connect_timeout_s: float = 0.5
    timeout_s: float = 0.5
    """The backend drops a connection with requests in flight and no progress for so long."""
    min_bandwidth: ByteSize = ByteSize(4 << 20)
    """Bytes a second; a slower connection counts as hung."""
    lookup_timeout_s: float = 0.25
    """A lookup, or a PING at a connect, that takes longer counts as a failure of the server."""

    def __post_init__(self) -> None:
        check = partial(check_setting, self)
        for name in ("ttl_s", "connect_timeout_s", "timeout_s", "lookup_timeout_s"):
            is_time = 0 < getattr(self, name) < float("inf")
            check(name, is_time, "must be a positive number of seconds")
        check("ttl_s", 0.001 <= self.ttl_s <= _TEN_YEARS_S, "must be 0.001 seconds to ten years")
        check("connections", 1 <= self.connections <= 64, "must be 1 to 64")
        check("max_inflight_bytes", self.max_inflight_bytes >= 1 << 20, "must be >= 1 MiB")
        has_cert = self.cert_file or not self.key_file
        check("key_file", has_cert, "goes with cert_file, which is not set")
        AllowedServers((), self.servers)
        if self.secret_file:
            check_extra("secret_file", self.secret_file)
        has_tls = parse_url(self.url).tls
        for name in ("ca_file", "cert_file", "key_file"):
            check(name, has_tls or not getattr(self, name), _NO_TLS)

    def __repr__(self) -> str:
        return f"RedisOptions(url={redacted(self.url)!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("url", redacted(self.url))]


class Target(NamedTuple):
    """The content of a URL."""

    kind: str
    """Empty (one server), ``sentinel`` or ``cluster``."""
    tls: bool
    addresses: tuple[Address, ...]
    db: int
    service: str
    username: str

    def __repr__(self) -> str:
        return f"Target({', '.join(map(str, self.addresses))})"


def redacted(url: str) -> str:
    """Return a URL without user, password and query; of a wrong URL only the scheme."""
    try:
        target = _parse(url)
    except ValueError:
        return str(shown(url)) if "://" in url else HIDDEN
    service = f"/{target.service}" if target.service else ""
    return f"{url.partition('://')[0]}://{','.join(map(str, target.addresses))}{service}"


def parse_url(url: str) -> Target:
    """Parse a URL; the ConfigError for a malformed one shows its scheme and no more."""
    try:
        return _parse(url)
    except ValueError as error:
        remedy = str(error)
    raise ConfigError("url", redacted(url), remedy)


def _parse(url: str) -> Target:
    """Parse a URL with errors that quote none of it.

    ``urlsplit`` does not serve for the authority. It refuses a ``[`` in a password, accepts text
    around an IPv6 address, and quotes ports and hosts in its errors.
    """
    name, mark, rest = url.partition("://")
    scheme, _, kind = name.lower().partition("+")
    if not mark or scheme not in _SCHEMES or kind not in _KINDS:
        raise ValueError(_REMEDY)
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    behind = rest[len(authority) :]
    if "@" in behind:
        raise ValueError(_ESCAPES)
    userinfo, _, hosts = authority.rpartition("@")
    username, _, password = userinfo.partition(":")
    if password:
        raise ValueError(_NO_PASSWORD)
    path, _, query = behind.partition("?")
    settings = parse_qsl(query, keep_blank_values=True)
    if "#" in behind or (query and [setting for setting, _ in settings] != ["db"]):
        raise ValueError(_REMEDY)
    service, db = "", "0"
    if scheme == "unix":
        if kind or hosts or not path:
            raise ValueError(_REMEDY)
        addresses: tuple[Address, ...] = (Address("", 0, unquote(path)),)
    else:
        default_port = 26379 if kind == "sentinel" else 6379
        addresses = tuple(_address(host, default_port) for host in hosts.split(","))
        db = path.strip("/") or "0"
    if kind == "sentinel":
        service, _, db = path.strip("/").partition("/")
        if not service:
            raise ValueError("the path names the master's service: redis+sentinel://host/mymaster")
        service, db = unquote(service), db or "0"
    db = dict(settings).get("db", db)
    if not kind and len(addresses) != 1:
        raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    if kind == "cluster" and db != "0":
        raise ValueError("a cluster has database 0 only")
    if not _DATABASE.fullmatch(db):
        raise ValueError("the database, behind the host, is a number")
    return Target(kind, scheme == "rediss", addresses, int(db), service, unquote(username))


def _address(text: str, default_port: int) -> Address:
    found = _HOST.fullmatch(text)
    if found is None:
        raise ValueError(f"a host is name:port or [IPv6 address]:port; {_REMEDY}")
    port = int(found[2] or 0)
    if port > 65535:
        raise ValueError("a port is at most 65535")
    return Address(found[1].strip("[]").lower(), port or default_port)


class Access:
    """Everything that a connect needs: options, parsed URL, passwords and TLS context.

    Raises:
        ConfigError: A password or certificate is missing or unusable.
    """

    def __init__(self, options: RedisOptions) -> None:
        self.options = options
        self.target = parse_url(options.url)
        self.username = options.username or self.target.username
        self.tls = _tls_context(options) if self.target.tls else None
        self.allowed = AllowedServers(self.target.addresses, options.servers)
        self.password()  # an unreadable secret is an error at start
        self.sentinel_password()

    def password(self) -> str:
        """Read the password again, because an operator may have changed it; raises ConfigError."""
        return read_text(self.options, "password", _LINE_ENDS)

    def sentinel_password(self) -> str:
        return read_text(self.options, "sentinel_password", _LINE_ENDS)

    def weaknesses(self) -> list[tuple[str, str]]:
        """Return flaws of secrets that are no reason to refuse them, each with its remedy."""
        found = []
        for name, password in (
            ("password", self.password()),
            ("Sentinels' password", self.sentinel_password()),
        ):
            if password and is_guessable(password, MIN_PASSWORD_CHARS):
                problem = f"the {name} has fewer than {MIN_PASSWORD_CHARS} characters, or few kinds"
                remedy = "use a random one: ACL GENPASS, or openssl rand -hex 32"
                found.append((problem, remedy))
        for name in ("password_file", "sentinel_password_file", "secret_file", "key_file"):
            found += exposure(name, getattr(self.options, name))
        return found


def _tls_context(options: RedisOptions) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.ca_file or None)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError("ca_file", options.ca_file, f"cannot be used: {error}") from error
    if options.cert_file:
        read_file("cert_file", options.cert_file)
        if options.key_file:
            read_file("key_file", options.key_file)
        try:
            # An empty password keeps OpenSSL from asking the terminal for an encrypted key's.
            context.load_cert_chain(options.cert_file, options.key_file or None, password="")
        except (OSError, ValueError) as error:
            remedy = f"cannot be used with key_file {options.key_file!r}: {error}"
            raise ConfigError("cert_file", options.cert_file, remedy) from error
    return context
