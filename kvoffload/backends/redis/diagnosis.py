"""Why a Redis server cannot be examined, with the remedy for what is behind the error."""

import contextlib
import socket
from collections.abc import Sequence

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    NoPermissionError,
)

from kvoffload.backends.admin import Finding
from kvoffload.backends.redis.handshake import Refused
from kvoffload.backends.redis.options import Access, RedisOptions, Target
from kvoffload.backends.redis.resp import printable
from kvoffload.errors import HIDDEN, ConfigError

RIGHTS = "~kvoffload:* +getex +psetex +exists +pexpire +unlink +ping +info"
"""What an engine's user needs."""
_TLS_REMEDY = (
    "is the port a TLS port, does ca_file hold who signed the server's certificate, is it for this "
    "name, and does the server ask for cert_file and key_file?"
)
_CODES = {AuthenticationError: "NOAUTH", NoPermissionError: "NOPERM", BusyLoadingError: "LOADING"}
_DETAIL_CHARS = 1000
_HIDE_CHARS = 4
"""Passwords shorter than this are not looked for in texts: they would hide half the message."""


def refusal(error: BaseException, target: Target, options: RedisOptions, access: Access) -> Finding:
    """Say why a server cannot be examined, by what is behind the error."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    check, remedy = _by_answer(causes, target, options) or _by_connection(causes, target)
    return Finding(check, "failed", _said(error, access), remedy)


def _said(error: BaseException, access: Access) -> str:
    """The error's text without passwords: servers quote commands that they do not know."""
    text = str(error) or type(error).__name__
    for password in (access.password, access.sentinel_password):
        with contextlib.suppress(ConfigError):
            if len(secret := password()) >= _HIDE_CHARS:
                text = text.replace(secret, HIDDEN)
    return printable(text, _DETAIL_CHARS)


def _by_answer(
    causes: Sequence[BaseException], target: Target, options: RedisOptions
) -> tuple[str, str] | None:
    """The check that failed and its remedy, where something answered."""
    codes = {code for each in causes for kind, code in _CODES.items() if isinstance(each, kind)}
    refused = [each for each in causes if isinstance(each, Refused)]
    codes |= {"NOAUTH" if each.command == "AUTH" else each.code for each in refused}
    text = str(causes[0])
    if codes & {"NOAUTH", "WRONGPASS"}:
        return "password", _password_remedy(text, target, options)
    if "NOPERM" in codes:
        return "rights", f"ACL SETUSER <user> {RIGHTS}{_more_rights(target)}"
    if "LOADING" in codes:
        return "reachable", "it is reading its snapshot: wait; and a cache needs none (save '')"
    if "cluster support disabled" in text:
        return "topology", "this server is no part of a cluster: write redis://host:port"
    if any(each.command == "SENTINEL" for each in refused):
        return "topology", "this server is no Sentinel: write redis://host:port, or give Sentinels"
    if "DB index is out of range" in text:
        remedy = "CONFIG GET databases says how many there are; the first is 0, behind the host"
        return "database", f"the server has no database {target.db}: {remedy}"
    if any(isinstance(each, InvalidResponse) for each in causes) or "protocol:" in text:
        return "protocol", "something answers that is not Redis: check the port (6379 by default)"
    return None


def _by_connection(causes: Sequence[BaseException], target: Target) -> tuple[str, str]:
    """The check that failed and its remedy, where nothing answered."""
    remedy = "check host, port, firewall and that the server runs"
    if any(isinstance(each, socket.gaierror) for each in causes):
        remedy = "no such host name is known here: check the spelling, and the resolver"
    elif target.addresses[0].path:
        remedy = _socket_remedy(causes)
    elif target.kind == "sentinel" and len(causes) == 1:
        remedy = "check the service's name, and that its master runs"
    elif any(isinstance(each, ConnectionRefusedError) for each in causes):
        remedy = "nothing listens there: check host and port, and that the server runs"
    elif any(isinstance(each, TimeoutError) for each in causes):
        remedy += f"; {_TLS_REMEDY}" if target.tls else ""  # a plain port waits for more to read
    elif target.tls:
        return "encryption", _TLS_REMEDY
    elif any(isinstance(each, ConnectionResetError) or "closed" in str(each) for each in causes):
        remedy = "it closes connections: a TLS port, which takes rediss://, or a port not Redis'"
    return "reachable", remedy


def _more_rights(target: Target) -> str:
    return (" +cluster|slots" if target.kind == "cluster" else "") + (" +select" * bool(target.db))


def _password_remedy(text: str, target: Target, options: RedisOptions) -> str:
    whose = "Sentinels' password" if "Sentinel" in text else "password"
    prefix = "sentinel_" if "Sentinel" in text else ""
    given = ("password_env", "password_file")
    source = next((name for name in given if getattr(options, prefix + name)), "")
    if source:
        where = f"{prefix}{source} does not hold the {whose} of this user"
    elif target.password and not prefix:
        where = "the URL does not hold the password of this user (/ ? # @ % are written %2F ...)"
    else:
        where = f"the server wants a {whose}, and none is given"
    return f"{where}: set {prefix}username and {prefix}password_file; ACL LIST shows the users"


def _socket_remedy(causes: Sequence[BaseException]) -> str:
    if any(isinstance(each, FileNotFoundError) for each in causes):
        return "there is no such socket: compare with unixsocket in the server's configuration"
    if any(isinstance(each, PermissionError) for each in causes):
        return "this user may not use the socket: unixsocketperm 770, and the server's group"
    return "nobody listens on this socket: start the server"
