"""What clients ask for, how far it is followed, and what they are told in return.

vLLM's half logs a line for each wish in ``kv_transfer_params`` that it does not understand, with
the whole wish in it. One request could stop the scheduler's thread for seconds and fill the log. So
wishes are bounded before its half reads them.

vLLM takes the ``uuid`` that a client gives an image as that image's hash, and with scale-out the
``features.mm_hashes`` of a request. A client can send one image under the hash of another image.
Clients that send the other image are then served its KV. In vLLM alone that lasts as long as the
GPU blocks; a tier would keep it for days.

Requests with the hint ``explain`` are told where each of their chunks was, or why it was not
loaded.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from vllm.v1.kv_offload.base import Locality, Medium

from kvoffload.backends.base import Removal
from kvoffload.connectors.vllm.start import VllmConfigSettings
from kvoffload.errors import ConfigError
from kvoffload.offload.base import Job, OffloadKey, Reason
from kvoffload.offload.hints import MAX_NAMES, PARAM

log = logging.getLogger(__name__)

# ---- Parameters ----

_LIMITS = ("max_load_tokens", "max_offload_tokens")
_TIERS = "kv_load_tiers"
_OF_OTHER_TIERS = ("remote_prefiller", "remote_decoder", "remote_kv_source")
"""Where vLLM's tier between engines (P2P) finds its peer."""
_KNOWN: Mapping[str, frozenset[str]] = {
    "medium": frozenset(medium.value for medium in Medium),
    "locality": frozenset(locality.value for locality in Locality),
}
_LONGEST = max(len(name) for names in _KNOWN.values() for name in names)


class ClientParams:
    """Drops wishes that vLLM's half would log; the first one of each kind is logged here.

    Wishes that are for tiers of vLLM's own offloading are logged as well, and nothing else.

    Args:
        count: called with the name of a counter for each wish that is ignored.
        takes_sessions: whether vLLM's own name of a session counts as the hint ``session``.
    """

    def __init__(self, count: Callable[[str], None], takes_sessions: bool = False) -> None:
        self._count = count
        self._takes_sessions = takes_sessions
        self._logged: set[str] = set()

    def of(self, request: Any) -> Any:
        """Return a request's parameters: bounded, and with the name of its session."""
        params = self.bounded(request.kv_transfer_params)
        named = params if isinstance(params, Mapping) else ()
        for_others = [name for name in _OF_OTHER_TIERS if name in named]
        if request.kv_hints is not None:
            for_others.append("kv_hints")
        self._note(for_others, "wishes_refused", "it is for a tier of vLLM's own offloading")
        session = request.session_id if self._takes_sessions else None
        if not session or not isinstance(params, Mapping | None):
            return params
        hints = (params or {}).get(PARAM, {})
        if not isinstance(hints, Mapping):
            return params
        return {**(params or {}), PARAM: {"session": session, **hints}}

    def bounded(self, params: Any) -> Any:
        """Return a request's parameters, or a copy without what vLLM's half cannot read.

        Args:
            params: as the client sent them; not changed.
        """
        if not isinstance(params, Mapping):
            return params
        bad = [name for name in _LIMITS if not _is_limit(params.get(name))]
        tiers = params.get(_TIERS)
        if tiers is not None and not _are_tiers(tiers):
            bad.append(_TIERS)
        if not bad:
            return params
        self._note(bad, "hints_ignored", "it is malformed, unknown or too long")
        return {name: value for name, value in params.items() if name not in bad}

    def _note(self, names: Iterable[str], counter: str, why: str) -> None:
        text = "kvoffload: %s of a request is ignored: %s; further ones count as %s"
        for name in names:
            self._count(counter)
            if name not in self._logged:
                self._logged.add(name)
                log.warning(text, name, why, counter)


def _is_limit(value: object) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _are_tiers(value: object) -> bool:
    """Whether a list names media and localities that vLLM knows, in a few objects."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_NAMES
        and all(isinstance(entry, dict) for entry in value)
        and all(
            _is_name(entry.get(field), known) for entry in value for field, known in _KNOWN.items()
        )
    )


def _is_name(value: object, known: frozenset[str]) -> bool:
    if value is None:
        return True
    return isinstance(value, str) and len(value) <= _LONGEST and value.upper() in known


# ---- Images ----


def are_counted(vllm_config: Any) -> bool:
    """Whether vLLM names media by a counter of each process, in place of a hash.

    It does so where it has no use for their hashes: without prefix caching and processor cache.
    """
    media = vllm_config.model_config.multimodal_config
    return bool(
        media
        and media.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    )


def may_have_media(request: Any, vllm_config: Any) -> bool:
    """Whether a request has images, or is a session whose later parts may have some."""
    is_session = bool(getattr(request, "resumable", False))
    return bool(request.mm_features or (is_session and vllm_config.model_config.multimodal_config))


def is_trusted(request: Any, settings: VllmConfigSettings, vllm_config: Any) -> bool:
    """Whether the hashes of a request's blocks say what its blocks hold.

    An identifier that a client chose cannot be told from the hash of a content. So a request with
    images is trusted only in the space of its own ``cache_salt``. A counter names another image
    after each restart, so nothing makes it a name of content.
    """
    if not may_have_media(request, vllm_config):
        return True
    has_names = bool(settings.trust_image_uuids or request.cache_salt)
    return has_names and not are_counted(vllm_config)


def refuse_weak_hashes(vllm_config: Any, settings: VllmConfigSettings) -> None:
    """Refuse block hashes whose collisions a client can search for, where they outlive the GPU.

    Raises:
        ConfigError: a tier is configured and the hash is not cryptographic.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if settings.has_tiers and algorithm.startswith("xxhash") and not settings.allow_weak_hashes:
        raise ConfigError(
            "prefix_caching_hash_algo",
            algorithm,
            "a client can make two prompts with the same block hash, and tiers keep what the wrong "
            "one left; set --prefix-caching-hash-algo sha256, or, where every client is trusted, "
            '"allow_weak_hashes": true',
        )


def warn_of_images(vllm_config: Any, settings: VllmConfigSettings) -> None:
    """Say at the start what becomes of requests with images."""
    if not vllm_config.model_config.is_multimodal_model:
        return
    if vllm_config.model_config.multimodal_config.allow_missing_mm_embeddings:
        log.warning(
            "kvoffload: vLLM takes embeddings of media from every client here, and requests that "
            "leave them out. One of a wrong shape ends the engine: let the gateway remove content "
            "parts whose type ends in _embeds."
        )
    if are_counted(vllm_config):
        log.warning(
            "kvoffload: requests with images stay out of all tiers, because vLLM names images by a "
            "counter with --no-enable-prefix-caching and --mm-processor-cache-gb 0. Leave one out."
        )
    elif settings.trust_image_uuids:
        log.warning(
            "kvoffload: trust_image_uuids is set: a client that may send a uuid with an image can "
            "have its own KV served to other clients. Let the gateway remove multi_modal_uuids, "
            "features.mm_hashes and the uuid of each content part."
        )
    else:
        log.info(
            "kvoffload: requests with images and without cache_salt stay out of all tiers, because "
            "vLLM takes a client's uuid as the hash of an image. Where a gateway removes uuids, "
            'set "trust_image_uuids": true.'
        )


# ---- Explanations ----

CORRUPT = "corrupt"
"""The reason that stores give for a chunk that failed verification."""


class ExplainedRequests:
    """Places and reasons of chunks, from a request's first lookup to its end.

    Args:
        explain: the manager's; takes keys and vLLM's context of a request.
    """

    def __init__(self, explain: Callable[[Sequence[OffloadKey], Any], list[str]]) -> None:
        self._explain = explain
        self._places: dict[str, list[dict[OffloadKey, str]]] = {}
        """Request → for each group, the places of its chunks."""

    def add(self, req_id: str, groups: Iterable[Iterable[OffloadKey]], req_context: Any) -> None:
        """Note where the chunks of a request are now."""
        keys_of = [list(keys) for keys in groups]
        self._places[req_id] = [
            dict(zip(keys, self._explain(keys, req_context), strict=True)) for keys in keys_of
        ]

    def load_failed(self, req_id: str, job: Job) -> None:
        """Note why chunks of a load did not arrive."""
        for group in self._places.get(req_id, ()):
            for key, fine in zip(job.keys, job.ok, strict=True):
                # A store that found the chunk damaged has reported it before, and more exactly.
                if not fine and group.get(key, CORRUPT) != CORRUPT:
                    group[key] = job.reason or Reason.FAILED

    def removed(self, removals: Iterable[Removal]) -> None:
        """Note the chunks that a store removed because they were damaged."""
        if not self._places:
            return
        damaged = [OffloadKey(it.key) for it in removals if it.reason == CORRUPT]
        for group in chain.from_iterable(self._places.values()):
            group.update((key, CORRUPT) for key in damaged if key in group)

    def finish(self, req_id: str, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """Add what is known of an ended request to the parameters that vLLM gives its client."""
        groups = self._places.pop(req_id, None)
        if groups is None:
            return params
        return {**(params or {}), PARAM: {"chunks": [list(group.values()) for group in groups]}}
