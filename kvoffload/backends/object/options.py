"""Settings of the object backend: the bucket's URL, credentials, deadlines and limits.

No code opens a socket. No error, log line or repr made here contains any part of a secret.
"""

import re
from functools import partial
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from kvoffload.backends.secret_files import exposure
from kvoffload.config import ByteSize, check_threads
from kvoffload.errors import ConfigError, check_setting, shown
from kvoffload.extras import check_extra

Provider = Literal["s3", "gs", "az"]

_TEN_YEARS_S = 10 * 365 * 86400.0
_SEGMENT = re.compile(r"[A-Za-z0-9!_.*'()=+@~-]+")
"""A part of a prefix that no provider escapes."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_URLS = "write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://ACCOUNT/CONTAINER/PREFIX"
_NO_SECRETS = (
    "credentials, queries and fragments do not belong into it: ps and logs would show them. Name "
    "an environment variable or a file in secret_key_env, secret_key_file and the like"
)
_SECRETS = ("access_key", "secret_key", "token")
_MEANT_FOR = {"access_key": ("s3",), "secret_key": ("s3", "gs", "az"), "token": ("s3", "gs", "az")}


class ObjectOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bucket, credentials, deadlines and limits; ``docs/guides/object.md`` says how to choose.

    Without a secret here, credentials come from the platform: the provider's environment variables,
    a service account of the pod, or the instance's metadata. A file is read again each minute.
    """

    url: str
    """``s3://BUCKET/PREFIX``, ``gs://BUCKET/PREFIX`` or ``az://ACCOUNT/CONTAINER/PREFIX``."""
    endpoint: str = ""
    """The server, if it is not the provider's: ``https://s3.internal:9000``."""
    region: str = ""
    """Of an S3 bucket; by default that of ``AWS_REGION``, else ``us-east-1``."""
    access_key_env: str = ""
    """Environment variable with the access key's id, for S3."""
    access_key_file: str = ""
    """File with it."""
    secret_key_env: str = ""
    """Environment variable with the secret access key of S3, the account's key of Azure, or the
    service account's JSON of Google."""
    secret_key_file: str = ""
    """File with it."""
    token_env: str = ""
    """Environment variable with the session's token of S3, a shared access signature of Azure, or
    an access token of Google."""
    token_file: str = ""
    """File with it."""
    ca_file: str = ""
    """Certificates that are trusted as the system's are."""
    threads: int = 16
    """Chunks loaded at once, and as many stored at once."""
    max_inflight_bytes: ByteSize = ByteSize(256 << 20)
    """Bytes of chunks in flight; one chunk may always be in flight."""
    ttl_s: float = 604800.0
    """An older object is a miss, and the next store of its key replaces it. A lifecycle rule of the
    bucket deletes it: set the rule to a day more."""
    timeout_s: float = 4.0
    """Each request ends after so long, whatever the server does."""
    manifest: bool = False
    """Write the names of stored chunks into one small object a minute, and read those of other
    engines: lookups then send no request. A chunk is known elsewhere after up to two minutes."""

    def __post_init__(self) -> None:
        place = parse_url(self.url)
        check_extra("url", self.url)
        _check_endpoint(self.endpoint, place.provider)
        check, is_s3 = partial(check_setting, self), place.provider == "s3"
        check("region", is_s3 or not self.region, "belongs to S3: leave it out")
        check("timeout_s", 0 < self.timeout_s <= 600, "must be 0 to 600 seconds, above 0")
        check("ttl_s", 1 <= self.ttl_s <= _TEN_YEARS_S, "must be 1 second to ten years")
        check_threads("threads", self.threads)
        check("max_inflight_bytes", self.max_inflight_bytes >= 1 << 20, "must be >= 1 MiB")
        self._check_secrets(place.provider)

    def __repr__(self) -> str:
        return f"ObjectOptions(url={self.url!r})"  # which has no secret: it was parsed

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("url", self.url)]

    def _check_secrets(self, provider: Provider) -> None:
        for name in _SECRETS:
            variable, file = f"{name}_env", f"{name}_file"
            has_one = not (getattr(self, variable) and getattr(self, file))
            check_setting(self, file, has_one, f"leave it out, or {variable}: one source is enough")
            for field in (variable, file):
                is_meant = provider in _MEANT_FOR[name] or not getattr(self, field)
                check_setting(self, field, is_meant, f"means nothing for {provider}://")
        given = {name for name in _SECRETS if self.is_given(name)}
        if provider == "s3" and given and not {"access_key", "secret_key"} <= given:
            missing = "access_key" if "access_key" not in given else "secret_key"
            remedy = f"must be set: S3 needs access_key and secret_key, and has {sorted(given)}"
            raise ConfigError(f"{missing}_file", "", remedy)
        if provider != "s3" and {"secret_key", "token"} <= given:
            field = "token_env" if self.token_env else "token_file"
            raise ConfigError(field, getattr(self, field), "leave it out, or secret_key")

    def is_given(self, name: str) -> bool:
        """Return whether a secret has a source here."""
        return bool(getattr(self, f"{name}_env") or getattr(self, f"{name}_file"))


class Place(NamedTuple):
    """The content of a URL."""

    provider: Provider
    account: str
    """Of Azure."""
    bucket: str
    prefix: str
    """Without slashes at its ends."""


def parse_url(url: str) -> Place:
    """Parse a URL; the ConfigError for a wrong one shows its scheme and no more."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme not in ("s3", "gs", "az"):
        raise ConfigError("url", url, _URLS)
    if "?" in rest or "#" in rest or ("@" in rest.partition("/")[0]):
        raise ConfigError("url", url, _NO_SECRETS)
    account, parts = "", rest.rstrip("/").split("/")
    if scheme == "az":
        account = parts.pop(0)
        if not re.fullmatch("[a-z0-9]{3,24}", account):
            raise ConfigError("url", url, f"the account has 3 to 24 small letters; {_URLS}")
    if not parts or not _BUCKET.fullmatch(parts[0]):
        raise ConfigError("url", url, f"has no name of a bucket; {_URLS}")
    bucket, *segments = parts
    for segment in segments:
        if not _SEGMENT.fullmatch(segment) or set(segment) == {"."} or len(segment) > 200:
            remedy = "the prefix has letters, digits and - _ . between single slashes"
            raise ConfigError("url", url, remedy)
    prefix = "/".join(segments)
    if len(prefix) > 500:
        raise ConfigError("url", url, "the prefix is longer than 500 characters")
    return Place(cast(Provider, scheme), account, bucket, prefix)


def _check_endpoint(endpoint: str, provider: Provider) -> None:
    if not endpoint:
        return
    remedy = "write https://HOST:PORT"
    try:
        parts = urlsplit(endpoint)
        port_is_right = parts.port != 0
    except ValueError:
        parts, port_is_right = urlsplit(""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_right:
        raise ConfigError("endpoint", shown(endpoint), remedy)
    if "@" in endpoint or parts.query or parts.fragment:
        raise ConfigError("endpoint", shown(endpoint), f"{remedy}; {_NO_SECRETS}")
    if parts.path.strip("/") and provider != "az":
        remedy += " without a path: the bucket and its prefix are in url"
        raise ConfigError("endpoint", shown(endpoint), remedy)


def weaknesses(options: ObjectOptions) -> list[tuple[str, str]]:
    """Return flaws that are no reason to refuse the settings, each with its remedy."""
    files = [f"{name}_file" for name in _SECRETS]
    found = [each for field in files for each in exposure(field, getattr(options, field))]
    if is_in_the_clear(options):
        problem = "the network carries chunks in the clear; they reveal prompts"
        found.append((problem, "use an endpoint with https://, or a private network"))
    return found


def is_in_the_clear(options: ObjectOptions) -> bool:
    """Return whether chunks leave this machine without TLS."""
    parts = urlsplit(options.endpoint)
    is_local = parts.hostname in ("localhost", "::1") or (parts.hostname or "").startswith("127.")
    return parts.scheme == "http" and not is_local
