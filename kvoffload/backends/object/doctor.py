"""The doctor: checks of a bucket before engines depend on it, each with a remedy."""

import itertools
import os
import statistics
import time
from collections.abc import Callable

from kvoffload.backends.admin import Finding, duration, first_of
from kvoffload.backends.object.admin import Operator
from kvoffload.backends.object.bucket import Bucket, Put, proxy
from kvoffload.backends.object.failures import Failed, Failure
from kvoffload.backends.object.naming import PROBE
from kvoffload.backends.object.options import is_in_the_clear, weaknesses

MOST_SKEW_S = 60.0
IF_FAILED = "slower than timeout_s allows, or busy"
IF_SLOW = "larger chunks, more threads; recomputing may be faster"
_FAR_S = 0.05
"""A longer round trip makes lookups of long prompts late."""
_ROUND_TRIPS = 10
_LISTED = 1000


def examine(operator: Operator) -> list[Finding]:
    """Examine a bucket: the first failure ends it, because the rest would fail alike."""
    bucket, options = operator.bucket, operator.options
    try:
        bucket.check()
    except Failed as failed:
        return [_explained("reachable", failed.failure)]
    findings = [Finding("reachable", "ok", f"{options.url} answers")]
    findings += _check_rights(bucket)
    if findings[-1].verdict != "failed":
        findings.append(_check_latency(bucket))
        findings.append(_check_lifecycle(operator))
    findings.append(
        first_of(
            "encryption",
            (is_in_the_clear(options), "warning", "the network carries chunks in the clear",
             "use an endpoint with https://, or a private network"),
            (options.endpoint.startswith("http:"), "ok", "none: a server on this machine", ""),
            (True, "ok", "TLS, certificate and host name checked", ""),
        )
    )  # fmt: skip
    findings += [Finding("secrets", "warning", *each) for each in weaknesses(options)[:3]]
    if variable := proxy():
        detail = f"{variable} is set: requests may go through a proxy"
        remedy = "name the endpoint in NO_PROXY, unless the proxy is meant"
        findings.append(Finding("proxy", "warning", detail, remedy))
    return findings


def _check_rights(bucket: Bucket) -> list[Finding]:
    """Do what engines do with an object of its own."""
    name, content = f"probe/{os.urandom(8).hex()}", os.urandom(1000)
    findings: list[Finding] = []
    parts: list[bytes | memoryview] = [content[:256], memoryview(content)[256:]]
    steps: tuple[tuple[str, Callable[[], object]], ...] = (
        ("write", lambda: bucket.put(name, parts, replace=True)),
        ("read", lambda: bucket.fetch(name, 2000) == content or _differs()),
        ("list", lambda: list(itertools.islice(bucket.list("probe"), 1)) or _differs()),
    )
    try:
        for right, step in steps:
            try:
                step()
            except (Failed, FileNotFoundError) as error:
                failure = error.failure if isinstance(error, Failed) else Failure("refused_gone")
                return [*findings, _explained(f"right to {right}", failure)]
        findings.append(Finding("rights", "ok", "writes, reads and lists"))
        findings.append(_check_create_only(bucket, name))
        skew_s = bucket.head(name).modified_s - time.time()
        findings.append(
            first_of(
                "clock",
                (abs(skew_s) > MOST_SKEW_S, "warning",
                 f"the server's clock is {duration(abs(skew_s))} off this host's",
                 "run a time service here: S3 refuses requests from 15 minutes on"),
                (True, "ok", "agrees with the server's", ""),
            )
        )  # fmt: skip
    except Failed as failed:
        findings.append(_explained("rights", failed.failure))
    finally:
        try:
            bucket.delete(name)
        except Failed as failed:
            remedy = "gc and cache clear need it (s3:DeleteObject); engines do not"
            text = f"no right to delete: {failed.failure}"
            findings.append(Finding("right to delete", "warning", text, remedy))
    return findings


def _differs() -> bool:
    raise Failed(Failure("refused_other", "the server does not return what was stored", "", True))


def _check_create_only(bucket: Bucket, name: str) -> Finding:
    try:
        if bucket.put(name, [b"another"], replace=False) is not Put.STORED:
            return Finding("create-only", "ok", "a second store of a chunk leaves the first one")
    except Failed as failed:
        remedy = "the server must know If-None-Match: take another server, or a newer version"
        return Finding("create-only", "failed", f"is refused: {failed.failure}", remedy)
    remedy = "stores of equal chunks replace each other: harmless, but each one is a new object"
    return Finding("create-only", "warning", "the server does not heed If-None-Match", remedy)


def _check_latency(bucket: Bucket) -> Finding:
    times = []
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        try:
            bucket.head(PROBE)
        except FileNotFoundError:
            times.append(time.perf_counter() - began)
    median_s = statistics.median(times) if times else 0.0
    detail = f"answers in {median_s * 1e3:.1f} ms (median)"
    if median_s > _FAR_S:
        remedy = "raise the engine's lookup_timeout_s, or set manifest; a nearer bucket is better"
        return Finding("latency", "warning", detail, remedy)
    return Finding("latency", "ok", detail)


def _check_lifecycle(operator: Operator) -> Finding:
    """Look for objects that a lifecycle rule should have deleted."""
    first = itertools.islice(operator.chunks(), _LISTED)
    ages = [time.time() - stored.modified_s for stored, _ in first]
    oldest_s, ttl_s = max(ages, default=0.0), operator.options.ttl_s
    if oldest_s > ttl_s + 2 * 86400:
        detail = f"a chunk is {duration(oldest_s)} old, and ttl_s is {duration(ttl_s)}"
        remedy = "add a lifecycle rule that deletes objects a day after ttl_s, or run gc"
        return Finding("lifecycle", "warning", detail, remedy)
    return Finding("lifecycle", "ok", f"no chunk of {len(ages)} is far older than ttl_s")


def _explained(check: str, failure: Failure) -> Finding:
    return Finding(check, "failed", str(failure), failure.remedy)
