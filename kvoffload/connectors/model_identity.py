"""Which model this is, told by its files and its configuration, in any engine."""

import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "_commit_hash")


def commit_of(model: str, revision: str | None) -> str | None:
    """Return the commit of a hub's repository that a revision means now; None if nothing tells.

    The name of a branch or a tag is no identity: it may mean other weights tomorrow.

    Args:
        model: a folder, or a name on a hub.
        revision: as the engine has it; None for the default branch.
    """
    # The hub's own class compares as the name that was asked for; it has the commit as well.
    named = getattr(revision, "resolved", None) or revision
    if named and _COMMIT.fullmatch(named):
        return str(named)
    if Path(model).is_dir():
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(model, "config.json", revision=revision)
    except (ImportError, ValueError):  # no name that a hub can have
        return None
    commit = Path(file).parent.name if isinstance(file, str) else ""
    return commit if _COMMIT.fullmatch(commit) else None


def weights_identity(
    weights_id: str | None,
    commit: str | None,
    model: str,
    *,
    dummy_seed: int | None,
    source: str,
    engine: str,
    strangers: str = "by another instance",
) -> str | None:
    """Tell the weights apart by the setting or by their files; None where the commit does.

    Args:
        weights_id: the setting; nothing is asked if it has a name.
        commit: of a model on a hub; see :func:`commit_of`.
        model: a folder, or a name on a hub.
        dummy_seed: of random weights; None for real ones.
        source: where the weights come from, for people.
        engine: a name that no other engine has.
        strangers: who has another such name, for people.
    """
    if weights_id:
        return weights_id
    if dummy_seed is not None:
        return f"dummy, seed {dummy_seed}"
    weights = files_digest(Path(model)) if Path(model).is_dir() else None
    if weights is None and commit is None:
        log.warning(
            "kvoffload: neither a commit nor files tell which weights of %s these are, so "
            "NOTHING STORED WILL BE FOUND after a restart or %s. Set weights_id.",
            source,
            strangers,
        )
        weights = f"known to {engine} alone"
    return weights


def files_digest(folder: Path) -> str | None:
    """Digest the weight files of a folder, by their facts and beginnings; None without files."""
    digest = hashlib.sha256()
    files = [file for pattern in _WEIGHT_FILES for file in sorted(folder.glob(pattern))]
    for file in files:
        facts = os.stat(file)  # follows links: hubs keep the files elsewhere
        digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
        with open(file, "rb") as data:
            digest.update(data.read(1 << 16))
    # Of weights that are streamed from elsewhere the folder has the configuration only.
    return digest.hexdigest() if files else None


def config_digest(hf_config: Any) -> str:
    """Digest a model's configuration without what does not change what it computes."""
    plain = {k: v for k, v in hf_config.to_dict().items() if k not in _NOT_IDENTITY}
    try:
        text = json.dumps(plain, sort_keys=True, default=_spelled)
    except ValueError:  # an object that contains itself
        text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _spelled(value: Any) -> Any:
    """Spell what JSON cannot, alike in every process: sets in order, objects by their contents.

    The text of a plain object is its address: with that in a digest each start finds nothing.
    """
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    text = str(value)
    if " at 0x" not in text:
        return text
    if hasattr(value, "__qualname__"):  # a function
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "__dict__"):
        return [type(value).__qualname__, vars(value)]
    log.warning(
        "kvoffload: %s in the model's configuration shows nothing but its address, so NOTHING "
        "STORED WILL BE FOUND after a restart or by another instance.",
        text,
    )
    return text
