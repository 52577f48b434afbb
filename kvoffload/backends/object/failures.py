"""Why a request to a bucket failed, from what the client library raises, and what helps.

The library's own texts are never shown: a request's URL is in them, and may have a signature.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from kvoffload.backends.base import ReadResult

_READ_CHARACTERS = 8000
"""Of a text, which a server decides in part."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>|\"(?:code|error)\": ?\"([A-Za-z]{1,64})\"")
_MISSING_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")


class Failure(NamedTuple):
    """What is wrong, and what helps."""

    reason: str
    """The end of a counter's name: ``lost_timeout``, ``refused_slow_down``..."""
    remedy: str = ""
    answer: str = ""
    """The status and code of the server's answer; empty without one."""
    is_lasting: bool = False
    """Whether it stays until an operator changes something."""

    @property
    def result(self) -> ReadResult:
        """The result of a load that failed so."""
        return ReadResult.of(self.reason)

    @property
    def is_vague(self) -> bool:
        """Whether the answer to another request may tell more: those to HEAD have no content."""
        return self.is_lasting and self.answer.isdigit()

    def __str__(self) -> str:
        text = self.reason.partition("_")[2].replace("_", " ")
        return f"{text} ({self.answer})" if self.answer else text


class Failed(Exception):
    """A request failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


BREAKER_OPEN = Failure("lost_breaker_open")
CANCELLED = Failure("lost_cancelled")
BUSY = Failure("lost_busy")
TIMEOUT = Failure("lost_timeout", "check network and server, or raise timeout_s")
NO_BUCKET = Failure(
    "refused_other",
    "check endpoint, and proxies on the way",
    "the answer is no bucket's",
    is_lasting=True,
)
"""It is a page for a login, say, or of a server of another kind."""

_LASTING: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("RequestTimeTooSkewed", "RequestExpired"), "refused_clock_skew",
     "this host's clock is wrong: start its time service (chrony, systemd-timesyncd)"),
    (("ExpiredToken", "TokenRefreshRequired", "RequestTokenExpired"), "refused_expired_token",
     "the session's token has expired: write a new one into token_file, or use the platform's"),
    (("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException",
      "TemporaryRedirect"),
     "refused_wrong_region", "set region to the bucket's"),
    (("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationFailed",
      "InvalidClientTokenId", "AuthFailure"), "refused_credentials",
     "the credentials are wrong: look at access_key, secret_key and token, or at the platform's"),
    (_MISSING_BUCKET, "refused_missing_bucket",
     "there is no such bucket: create it, or correct url, region and endpoint"),
    (("AccessDenied", "AllAccessDisabled", "AuthorizationFailure", "InsufficientAccountPermissions",
      "AuthorizationPermissionMismatch", "Forbidden"), "refused_forbidden",
     "the credentials are wrong or lack a right: grant read, write and list of the bucket "
     "(s3:GetObject, s3:PutObject, s3:ListBucket); without the right to list, S3 refuses requests "
     "for objects that are missing"),
)  # fmt: skip
"""Codes of answers, the reason that they stand for, and the remedy."""
_BY_REASON = {reason: remedy for _, reason, remedy in _LASTING}
_NO_REGION = "redirect without LOCATION"
_METADATA = (
    "latest/api/token", "latest/meta-data", "computeMetadata", "metadata/identity",
)  # fmt: skip
"""Parts of URLs where a platform has credentials, which the library asks if it has none."""
_NO_CREDENTIALS = Failure(
    "refused_credentials",
    "the platform gives no credentials: give the pod or the instance a role, set the provider's "
    "variables, or name files in secret_key_file and the like",
    is_lasting=True,
)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what the client library raises into :class:`Failed`.

    FileNotFoundError passes: the object is missing, not the bucket.
    """
    from obstore.exceptions import BaseError

    failure = None
    try:
        yield
    except FileNotFoundError as error:
        if not any(each in str(error)[:_READ_CHARACTERS] for each in _MISSING_BUCKET):
            raise FileNotFoundError from None
        failure = failure_of(error)
    except (BaseError, ValueError, OSError) as error:
        failure = failure_of(error)
    if failure is not None:  # outside of the clauses, so that no text of the library is chained
        raise Failed(failure)


def is_present(error: Exception) -> bool:
    """Return whether a store that only creates was refused because the object is there.

    The library says so of each 409, too. S3 answers that to a store which meets another store or a
    removal: there may be no object afterwards.
    """
    status, code = _answer(str(error)[:_READ_CHARACTERS])
    return status == 412 or code == "BlobAlreadyExists"  # as Azure says it


def is_unknown(error: Exception) -> bool:
    """Return whether the server does not know what it was asked for."""
    return _answer(str(error)[:_READ_CHARACTERS])[0] == 501


def failure_of(error: Exception) -> Failure:
    """Return why a request failed."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text = str(error)[:_READ_CHARACTERS]
    status, code = _answer(text)
    answer = f"{status or ''} {code}".strip()
    if any(each in text for each in _METADATA):
        return _NO_CREDENTIALS
    if any(each in text for each in _MISSING_BUCKET):
        code = "NoSuchBucket"
    for codes, reason, remedy in _LASTING:
        if code in codes:
            return Failure(reason, remedy, answer, True)
    if isinstance(error, FileNotFoundError):
        return _lasting("refused_missing_bucket", answer)
    if status in (429, 503) or code in ("SlowDown", "ServerBusy", "TooManyRequests"):
        return Failure("refused_slow_down", "the server asks for fewer requests", answer)
    if status == 301 or _NO_REGION in text:
        return _lasting("refused_wrong_region", answer or "301")
    if status == 401 or (isinstance(error, UnauthenticatedError) and not status):
        return _lasting("refused_credentials", answer)
    if status == 403 or isinstance(error, PermissionDeniedError):
        return _lasting("refused_forbidden", answer)
    if status >= 500:
        return Failure("refused_server_error", "look at the server's log", answer)
    if status:
        return Failure("refused_other", "look at the server's log", answer, status < 500)
    if "Unable to extract metadata" in text:
        return NO_BUCKET
    if "kind: Timeout" in text:
        return TIMEOUT
    if "kind: Connect" in text:
        return Failure("lost_unreachable", "check endpoint, network, certificate and name server")
    return Failure("lost_closed", "check the network and the server's log")


def _answer(text: str) -> tuple[int, str]:
    """Return the status and the code of a server's answer; 0 and an empty text without one."""
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    return status, next(filter(None, found.groups()), "") if (found := _CODE.search(text)) else ""


def _lasting(reason: str, answer: str) -> Failure:
    return Failure(reason, _BY_REASON[reason], answer, True)
