"""The bucket as the client library serves it: requests with deadlines, and credentials.

A request is sent once, without a retry. Credentials are read again while they are in use.
"""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvoffload.backends.header import COMPACT_BYTES
from kvoffload.backends.log_rate import Throttle
from kvoffload.backends.object.failures import (
    NO_BUCKET,
    Failed,
    Failure,
    explained,
    failure_of,
    is_present,
    is_unknown,
)
from kvoffload.backends.object.naming import PROBE
from kvoffload.backends.object.options import ObjectOptions, Place, parse_url
from kvoffload.backends.secret_files import read_text
from kvoffload.errors import ConfigError

if TYPE_CHECKING:  # settings are read and described without the library, too
    from obstore.store import AzureStore, GCSStore, S3Store

    Store = S3Store | GCSStore | AzureStore

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""What one step of a transfer receives: its copy keeps the GIL for 0.1 ms."""
_CONNECT_S = 2.0
_IDLE_S = 15.0
"""Servers close idle connections after 20 s and more, and then lose the next request."""
_READ_AGAIN_S = 60.0
_RENEWED_EARLY_S = 300.0
"""The library asks for new credentials so long before the old ones expire."""
_NAMES_A_DELETE = 1000


class Stored(NamedTuple):
    """An object, as a listing or an answer's headers tell."""

    name: str
    nbytes: int
    modified_s: float
    """Since the epoch, by the server's clock."""
    version: str
    """Differs from that of every earlier or later object of this name."""


class Put(Enum):
    """What a store found."""

    STORED = "stored"
    PRESENT = "present"
    """There is an object of this name, and it stays. Never the answer to a store that replaces."""
    CONFLICT = "conflict"
    """Another request for this name came between: its object is there, or none is."""


class Incoming:
    """An object that begins to arrive: its size is known, its bytes come piece by piece."""

    def __init__(self, found: Any) -> None:
        self._found = found
        self.stored = _stored(found.meta)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes; raises :class:`Failed`."""
        return map(memoryview, _each(lambda: self._found.stream(min_chunk_size=PIECE_BYTES)))


class Bucket:
    """Requests to one bucket, below the prefix of a URL. Any thread may call the methods.

    All raise :class:`Failed`, and FileNotFoundError for an object that is missing.

    Args:
        options: See :class:`ObjectOptions`.
        timeout_s: of each request, up to its last byte.
        retries: of a request that failed; 0 wherever an engine waits.

    Raises:
        ConfigError: a secret or certificate cannot be read, or the library refuses a setting.
    """

    def __init__(self, options: ObjectOptions, timeout_s: float, retries: int = 0) -> None:
        import obstore

        self.place = parse_url(options.url)
        self._library = obstore
        self._creates, self._said = True, Throttle(log)
        self._store = _open(options, self.place, timeout_s, retries)

    def check(self) -> None:
        """Ask for an object that is not there; raises :class:`Failed` if there is no bucket."""
        try:
            self.receive(PROBE)
        except FileNotFoundError:
            return

    def head(self, name: str) -> Stored:
        """Return what is known of an object."""
        with explained():
            return _stored(self._library.head(self._store, name))

    def receive(self, name: str) -> Incoming:
        """Begin to receive an object."""
        with explained():
            return Incoming(self._library.get(self._store, name))

    def fetch(self, name: str, most: int) -> bytes:
        """Return a small object; raises :class:`Failed` for one of more bytes."""
        incoming = self.receive(name)
        if incoming.stored.nbytes > most:
            raise Failed(Failure("refused_other", "the object is too large"))
        return b"".join(incoming.pieces())

    def header(self, name: str) -> bytes:
        """Return what an object has in the place of a header: less, if it is shorter."""
        with explained():
            return bytes(self._library.get_range(self._store, name, start=0, length=COMPACT_BYTES))

    def put(self, name: str, parts: Sequence[bytes | memoryview], *, replace: bool) -> Put:
        """Store an object from parts, whole, without a copy.

        A server that refuses the condition of a create has equal objects replaced from then on.
        """
        mode = "create" if self._creates and not replace else "overwrite"
        with explained():
            try:
                # The parts of a multipart upload would be several requests, and stay after a crash.
                self._library.put(self._store, name, list(parts), mode=mode, use_multipart=False)  # type: ignore[arg-type]
            except self._library.exceptions.AlreadyExistsError as error:
                return Put.PRESENT if is_present(error) else Put.CONFLICT
            except FileNotFoundError as error:  # a store needs a bucket, and no object
                raise Failed(failure_of(error)) from None
            except self._library.exceptions.BaseError as error:
                if mode == "overwrite" or not is_unknown(error):
                    raise
                self._creates = False
            else:
                return Put.STORED
        text = "object: the server refuses create-only stores (If-None-Match); %s"
        self._said.warning(text, "stores of equal chunks now replace each other: that is harmless")
        return self.put(name, parts, replace=True)

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        try:
            with explained():
                self._library.delete(self._store, [name])
        except FileNotFoundError:
            return

    def delete_all(self, names: Iterable[str]) -> int:
        """Delete many objects in few requests where the provider can; return their number."""
        deleted, left = 0, iter(names)
        while batch := list(itertools.islice(left, _NAMES_A_DELETE)):
            try:
                with explained():
                    self._library.delete(self._store, batch)
            except FileNotFoundError:  # one was gone, which some providers call an error
                for each in batch:
                    self.delete(each)
            deleted += len(batch)
        return deleted

    def list(self, prefix: str = "", after: str = "") -> Iterator[Stored]:
        """Yield the objects below a folder of names, in the order of names."""
        where = {"prefix": prefix or None, "offset": after or None}
        for batch in _each(lambda: self._library.list(self._store, **where, chunk_size=1000)):
            yield from map(_stored, batch)


def _each(begin: Callable[[], Any]) -> Iterator[Any]:
    """Yield what the library yields; raises :class:`Failed`."""
    with explained():
        found = iter(begin())
    while True:
        with explained():
            each = next(found, None)
        if each is None:
            return
        yield each


def _stored(meta: Any) -> Stored:
    modified_s = meta["last_modified"].timestamp()
    if not modified_s:  # the library's value where an answer has none
        raise Failed(NO_BUCKET)
    return Stored(meta["path"], meta["size"], modified_s, f"{meta['e_tag']} {modified_s}")


def _open(options: ObjectOptions, place: Place, timeout_s: float, retries: int) -> "Store":
    timeout = timedelta(seconds=timeout_s)
    client: dict[str, Any] = {
        "timeout": timeout,
        "connect_timeout": min(timeout, timedelta(seconds=_CONNECT_S)),
        "pool_idle_timeout": timedelta(seconds=_IDLE_S),
        "allow_http": options.endpoint.startswith("http://"),
    }
    if options.ca_file:
        try:
            client["root_certificate"] = Path(options.ca_file).read_bytes()
        except OSError as error:
            remedy = f"cannot be read: {error.strerror}"
            raise ConfigError("ca_file", options.ca_file, remedy) from error
    common = {
        "prefix": place.prefix or None,
        "client_options": client,
        "retry_config": {"max_retries": retries, "retry_timeout": timeout},
    }
    failure = ""
    try:
        return _STORES[place.provider](options, place, common | _credentials(options, place))
    except ConfigError:
        raise
    except Exception as error:  # its text may have a secret
        failure = type(error).__name__
    field = "ca_file" if options.ca_file else "url"
    remedy = f"the client library refuses it, an endpoint or a credential ({failure})"
    raise ConfigError(field, getattr(options, field), remedy)


def _credentials(options: ObjectOptions, place: Place) -> dict[str, Any]:
    """Return what the library calls for credentials; nothing where the platform has them.

    It reads them each minute, and now once: an unreadable secret is an error at start.
    """
    given = {
        name: called for name, called in _CALLED[place.provider].items() if options.is_given(name)
    }

    def credentials() -> dict[str, Any]:
        lives = timedelta(seconds=_READ_AGAIN_S + _RENEWED_EARLY_S)
        read = {called: read_text(options, name) for name, called in given.items()}
        return {**read, "expires_at": datetime.now(UTC) + lives}

    credentials()
    return {"credential_provider": credentials} if given else {}


def _s3(options: ObjectOptions, place: Place, common: dict[str, Any]) -> "Store":
    # Over TLS the body needs no second hash, and each chunk has a checksum of its own.
    settings: dict[str, Any] = {"unsigned_payload": True}
    if options.endpoint:
        settings |= {"endpoint": options.endpoint, "virtual_hosted_style_request": False}
    if options.region:
        settings["region"] = options.region
    from obstore.store import S3Store

    return S3Store(place.bucket, **settings, **common)


def _gs(options: ObjectOptions, place: Place, common: dict[str, Any]) -> "Store":
    settings: dict[str, Any] = {"base_url": options.endpoint} if options.endpoint else {}
    if options.is_given("secret_key"):
        settings["service_account_key"] = read_text(options, "secret_key")
    from obstore.store import GCSStore

    return GCSStore(place.bucket, **settings, **common)


def _az(options: ObjectOptions, place: Place, common: dict[str, Any]) -> "Store":
    settings: dict[str, Any] = {"account_name": place.account}
    if options.endpoint:
        settings["endpoint"] = options.endpoint
    from obstore.store import AzureStore

    return AzureStore(place.bucket, **settings, **common)


_STORES = {"s3": _s3, "gs": _gs, "az": _az}
_CALLED = {
    "s3": {"access_key": "access_key_id", "secret_key": "secret_access_key", "token": "token"},
    "gs": {"token": "token"},
    "az": {"secret_key": "access_key", "token": "sas_token"},
}
"""Secrets that may change at any time, and their names in the library."""


def proxy() -> str:
    """Return the environment variable of a proxy that requests go through; empty without one."""
    names = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")
    both = [*names, *(name.lower() for name in names)]
    return next((name for name in both if os.environ.get(name)), "")
