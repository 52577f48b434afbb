"""What a request's pages are stored under, besides its tokens and its ``cache_salt``.

SGLang joins the client's ``extra_key`` and the adapter's name without a mark between them, so a
client could send the name of an adapter. A name of SGLang says nothing of the adapter's content
either: an adapter that is trained on keeps it, and one that is loaded by HTTP gets a new one at
each start. Here the two parts are told apart, and an adapter is named by its content.
"""

import hashlib
import logging
from collections.abc import Callable
from typing import Any

from kvoffload.connectors.configuration import fact
from kvoffload.connectors.sglang import harmless_arguments as harmless
from kvoffload.connectors.sglang.engine_start import start_name
from kvoffload.connectors.weights import adapter_digest, commit_of

log = logging.getLogger(__name__)

INIT = "sglang.srt.managers.schedule_batch.Req.__init__"
LOAD = "sglang.srt.lora.lora_manager.LoRAManager._load_lora_adapter"
"""Both ``--lora-paths`` and the endpoint end there."""

_adapters: dict[str, str] = {}
"""The content of each loaded adapter, by SGLang's name of it."""
_managers: list[Any] = []
"""SGLang's manager of adapters, of this process."""


def separated_key(extra_key: str | None, lora_id: str | None) -> str | None:
    """Return the key of a request's pages from the one that SGLang has joined.

    Args:
        extra_key: the client's, with the name of the adapter at its end.
        lora_id: SGLang's name of the adapter; None for the base model.
    """
    client = (extra_key or "").removesuffix(lora_id or "")
    parts = []
    if client:  # a digest, so that no client spells what stands behind it
        parts.append(f"client:{hashlib.sha256(client.encode(errors='surrogatepass')).hexdigest()}")
    if lora_id is not None:
        parts.append(f"adapter:{_adapters.get(lora_id) or _unknown(lora_id)} {_modules()}")
    return " ".join(parts) or None


def after_request(result: None, request: Any, *args: Any, **kwargs: Any) -> None:
    """Separate the parts of a request's key; a hook on its class."""
    request.extra_key = separated_key(request.extra_key, request.lora_id)


def around_load(load: Callable[..., Any], manager: Any, adapter: Any) -> Any:
    """Name an adapter by its content, which must be the same before and after it is read."""
    _managers[:] = [manager]
    for gone in _adapters.keys() - getattr(manager, "lora_refs", _adapters).keys():
        del _adapters[gone]  # unloaded: a further load notes it again
    before = _content(adapter.lora_path)
    answer = load(manager, adapter)
    is_known = before is not None and _content(adapter.lora_path) == before
    if not is_known:
        log.warning(
            "kvoffload: neither files nor a commit tell the content of the adapter %s, so its "
            "pages are not found after a restart",
            adapter.lora_name,
        )
    _adapters[adapter.lora_id] = str(before) if is_known else _unknown(adapter.lora_id)
    return answer


def _content(path: str) -> str | None:
    told = adapter_digest(path)
    if told is None and (commit := commit_of(path, None, "adapter_config.json")):
        told = f"commit {commit}"
    return None if told is None else hashlib.sha256(f"{told} {_options()}".encode()).hexdigest()


def _options() -> str:
    """Spell the options of SGLang that decide what an adapter computes."""
    from sglang.srt.runtime_context import get_context

    values = {name: get_context().config_leaf(name) for name in harmless.OF_ADAPTERS}
    return str(fact("lora", values))


def _modules() -> str:
    """Spell the modules that SGLang adapts, which all of its adapters decide.

    It computes without an adapter's weights of other modules.
    """
    found = {str(name) for each in _managers for name in getattr(each, "target_modules", ())}
    return ",".join(sorted(found))


def _unknown(lora_id: str) -> str:
    return f"{lora_id} of {start_name()}"
