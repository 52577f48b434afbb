"""A model's configuration of Hugging Face's form, as facts."""

import re
from collections.abc import Mapping
from typing import Any

from kvoffload.connectors.configuration import facts_of, names
from kvoffload.identity import Fact

_HARMLESS = {
    "where it was read, and what wrote it": "_name_or_path _commit_hash transformers_version",
    "names of labels; no layer reads them": "id2label label2id problem_type finetuning_task",
    "what transformers returns from its own forward pass": (
        "return_dict output_attentions output_hidden_states use_cache torchscript"
    ),
    "an engine's limit that vLLM writes here for one model, and reads for the length of a table": (
        "max_model_len"
    ),
}


_OTHER_SOURCE = re.compile(r".*_(model_id|model_path|tower|repo|repo_id)")
"""Names of fields that may name another model, whose weights a part of this one has."""


def hf_facts(hf_config: Any, prefix: str = "hf_config.") -> dict[str, Fact]:
    """Return each field of a model's configuration, but those known to change no computation.

    Args:
        hf_config: as the engine's model code sees it: after overrides.
        prefix: what the facts' names begin with.
    """
    return facts_of(_without(hf_config.to_dict(), names(_HARMLESS)), prefix=prefix)


def _without(value: Any, left_out: frozenset[str]) -> Any:
    """Leave names out of a configuration, and of those in it."""
    if not isinstance(value, dict):
        return value
    return {k: _without(v, left_out) for k, v in value.items() if k not in left_out}


def names_other_weights(hf_config: Any) -> bool:
    """Whether a part of a model may have weights of another model, which its own files lack."""
    return _names_others(hf_config.to_dict())


def _names_others(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return any(
        bool(_OTHER_SOURCE.fullmatch(str(name)) and inner)
        if isinstance(inner, str)
        else _names_others(inner)
        for name, inner in value.items()
    )
