"""LoRA adapters in block hashes: by content, where vLLM has their name and path.

An adapter that was trained again lies under its old path, and vLLM's hashes stay as they were. So
the content of its files is hashed as well. A request whose adapter nothing tells stays out of the
tiers. So does one whose files changed after they were read: the engine may have loaded either. An
adapter of a hub is told by nothing: vLLM asks for its newest commit each time it loads it.
"""

import logging
import threading
from collections.abc import Hashable
from functools import wraps
from typing import Any, NamedTuple

from kvoffload.connectors.weights import adapter_digest, changes_of

log = logging.getLogger(__name__)

_CONTENT = "_kvoffload_adapter"
"""Of a request: who read its adapter, and the digest; empty where nothing tells it."""


class _Read(NamedTuple):
    digest: str
    changes: Hashable


class Adapters:
    """The content of adapters as an engine has loaded them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[tuple[str, str, int], _Read] = {}

    def content(self, lora: Any) -> str:
        """Return the digest of an adapter; empty where its files changed, or tell nothing."""
        with self._lock:
            known = self._read.get(name := _name(lora))
            if known is None:
                known = self._read[name] = self._digest(lora)
            elif known.digest and _changes(lora) != known.changes:
                log.warning(
                    "kvoffload: the files of adapter %s in %s changed after they were read. Its "
                    "requests stay out of all tiers until it is unloaded and loaded again.",
                    lora.lora_name,
                    lora.lora_path,
                )
                known = self._read[name] = _Read("", None)
            return known.digest

    def loads(self, lora: Any) -> None:
        """Note that the engine is about to read an adapter, or has it."""
        with self._lock:
            if lora.load_inplace:
                self._read.pop(_name(lora), None)
        self.content(lora)

    def unloaded(self, number: int) -> None:
        """Forget an adapter: the engine reads its files again when it is loaded."""
        with self._lock:
            for name in [name for name in self._read if name[2] == number]:
                del self._read[name]

    @staticmethod
    def _digest(lora: Any) -> _Read:
        before = _changes(lora)
        digest = (before is not None and adapter_digest(lora.lora_path)) or ""
        if not digest or _changes(lora) != before:
            log.warning(
                "kvoffload: nothing tells the content of adapter %s in %s, so its requests stay "
                "out of all tiers. A folder of this machine would.",
                lora.lora_name,
                lora.lora_path,
            )
            return _Read("", None)
        return _Read(digest, before)


def _name(lora: Any) -> tuple[str, str, int]:
    return lora.lora_name, lora.lora_path, lora.lora_int_id


def _changes(lora: Any) -> Hashable:
    try:
        return changes_of(lora.lora_path)
    except OSError:
        return None


def is_told(request: Any) -> bool:
    """Whether the hashes of a request have its adapter's content, and its files are still those."""
    if not request.lora_request:
        return True
    adapters, digest = vars(request).get(_CONTENT, (None, ""))
    return bool(digest) and adapters.content(request.lora_request) == digest


def hash_adapters() -> None:
    """Let this process's block hashes have the content of adapters. Idempotent."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    theirs = getattr(kv_cache_utils, "_gen_lora_extra_hash_keys", None)
    if theirs is None or hasattr(theirs, _CONTENT):
        return  # without it each request with an adapter stays out of the tiers
    adapters = Adapters()

    @wraps(theirs)
    def with_content(request: Any) -> Any:
        keys = theirs(request)
        if not keys:
            return keys
        if _CONTENT not in vars(request):  # once: the rest of its blocks are the same adapter's
            setattr(request, _CONTENT, (adapters, adapters.content(request.lora_request)))
        _, content = vars(request)[_CONTENT]
        # Events show the second item of each key alone: a name.
        return [(*key, content) for key in keys] if content else keys

    setattr(with_content, _CONTENT, adapters)
    kv_cache_utils._gen_lora_extra_hash_keys = with_content
    add, remove = EngineCore.add_lora, EngineCore.remove_lora

    @wraps(add)
    def add_lora(core: Any, lora_request: Any) -> Any:
        adapters.loads(lora_request)
        added = add(core, lora_request)
        adapters.content(lora_request)  # files that changed meanwhile tell nothing
        return added

    @wraps(remove)
    def remove_lora(core: Any, lora_id: int) -> Any:
        adapters.unloaded(lora_id)
        return remove(core, lora_id)

    EngineCore.add_lora, EngineCore.remove_lora = add_lora, remove_lora
