"""Which weights a model computes with, told by their content.

A name, a time or a place tells nothing: a download has new times, and a merged adapter old ones.
So each file is sampled: see :mod:`kvoffload.connectors.weight_samples`.
"""

import hashlib
import json
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvoffload.connectors.configuration import names
from kvoffload.connectors.weight_samples import file_digest

log = logging.getLogger(__name__)

_COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors"})
_COUNTED_BELOW = _WEIGHTS | {".json", ".py"}
_OF_TOKENIZERS = "prompts come as token ids, which are in the hashes"
_HARMLESS_FILES = {
    _OF_TOKENIZERS: (
        "tokenizer.json tokenizer.model tokenizer_config.json tokenizer.vocab merges.txt "
        "vocab.json vocab.txt special_tokens_map.json added_tokens.json chat_template.json "
        "chat_template.jinja"
    ),
    "the engine has resolved it: a fact of its own": "config.json params.json",
    "for people": "readme.md license license.txt license.md notice use_policy.md",
}
_HARMLESS_FOLDERS = re.compile(r"\..*|original|onnx|checkpoint-\d+")
"""Other forms of the same weights, and a training's earlier states."""
_ENDINGS_FOR_PEOPLE = frozenset({".md", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".txt"})

_INDEX = (".safetensors.index.json", ".bin.index.json")
_GENERATION = "generation_config.json"
_HARMLESS_OF_GENERATION = {
    "the next token is chosen after its KV": (
        "temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff do_sample num_beams "
        "repetition_penalty length_penalty no_repeat_ngram_size bad_words_ids suppress_tokens "
        "begin_suppress_tokens num_return_sequences"
    ),
    "when an answer ends": (
        "max_length max_new_tokens min_length min_new_tokens eos_token_id bos_token_id "
        "pad_token_id forced_eos_token_id stop_strings stop_words_ids"
    ),
    "who wrote it": "transformers_version _from_model_config chat_format",
}

_SLOW_S = 2.0


def commit_of(model: str, revision: str | None, file: str = "config.json") -> str | None:
    """Return the commit of a hub's repository that a revision means now; None if nothing tells.

    The name of a branch or a tag is no identity: it may mean other weights tomorrow.

    Args:
        model: a folder, or a name on a hub.
        revision: as the engine has it; None for the default branch.
        file: one that each such repository has.
    """
    # The hub's own class compares as the name that was asked for; it has the commit as well.
    named = getattr(revision, "resolved", None) or revision
    if named and _COMMIT.fullmatch(named):
        return str(named)
    if Path(model).is_dir():
        return _commit_of_snapshot(Path(model))
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, file, revision=revision)
    except (ImportError, ValueError):  # no name that a hub can have
        return None
    commit = Path(found).parent.name if isinstance(found, str) else ""
    return commit if _COMMIT.fullmatch(commit) else None


def _commit_of_snapshot(folder: Path) -> str | None:
    """Return the commit that a folder of the hub's cache is of: it is named by it."""
    kept = folder.parent
    is_one = kept.name == "snapshots" and kept.parent.name.startswith("models--")
    return folder.name if is_one and _COMMIT.fullmatch(folder.name) else None


def weights_identity(
    weights_id: str | None,
    model: str,
    revision: str | None,
    *,
    reads_files: bool = True,
    dummy_seed: int | None = None,
    unknown: str = "",
) -> str:
    """Tell the weights apart: by the setting, by a commit, or by the content of their files.

    Args:
        weights_id: the setting; nothing is asked if it has a name.
        model: a folder, or a name on a hub.
        revision: as the engine has it.
        reads_files: whether the engine reads just the files of the folder, or of the commit.
        dummy_seed: of random weights; None for real ones.
        unknown: the name of weights that nothing tells; a name that no restart repeats if empty.
    """
    if weights_id:
        return weights_id
    if dummy_seed is not None:
        return f"dummy, seed {dummy_seed}"
    if reads_files:
        if commit := commit_of(model, revision):
            return f"commit {commit}"
        if Path(model).exists() and (digest := folder_digest(Path(model))):
            return digest
    log.warning(
        "kvoffload: neither a commit nor files tell which weights of %s these are, so "
        "NOTHING STORED WILL BE FOUND after a restart or by another instance. Set weights_id.",
        model,
    )
    return unknown or f"known to this process alone: {uuid.uuid4().hex}"


def folder_digest(folder: str | os.PathLike[str]) -> str | None:
    """Digest a model's folder, or its one file, by content; None where nothing tells the weights.

    That is a folder that cannot be read, or one without a file of a known kind:
    ``.safetensors``, ``.bin``, ``.pt``, ``.pth``, ``.gguf``, ``.tensors``.
    Places, times and links do not count; contents do. Files that change no weight are left out.

    Args:
        folder: of the model, or its file.
    """
    begun_s = time.monotonic()
    try:
        files = list(_named(Path(folder)))
        digest = _digest(files)
    except OSError as error:  # it vanished, or is cut, or is of another user
        log.warning("kvoffload: the weights in %s cannot be read: %s", folder, error)
        return None
    if (took_s := time.monotonic() - begun_s) > _SLOW_S:
        log.info("kvoffload: the weights in %s were sampled in %.1f s", folder, took_s)
    # Of weights that are streamed from elsewhere the folder has the configuration only.
    has_weights = any(file.suffix in _WEIGHTS for _, file in files)
    return f"content {digest}" if has_weights else None


def files_digest(folder: Path) -> str | None:
    """Digest what a model's folder has besides weights: code, and the settings of processors.

    A name of the weights does not tell these. None where there is no folder.
    """
    if not folder.is_dir():
        return None
    try:
        return _digest(
            (name, file)
            for name, file in _named(folder)
            if file.suffix not in _WEIGHTS and not name.endswith(_INDEX)
        )
    except OSError as error:
        log.warning("kvoffload: files in %s cannot be read, so starts are cold: %s", folder, error)
        return f"known to this process alone: {uuid.uuid4().hex}"


def tokenizer_identity(tokenizer: str, revision: str | None) -> str:
    """Tell tokenizers apart, for a model that computes with more of one than token ids.

    Args:
        tokenizer: a folder, or a name on a hub.
        revision: as the engine has it.
    """
    if commit := commit_of(tokenizer, revision, "tokenizer_config.json"):
        return f"commit {commit}"
    listed = sorted(_HARMLESS_FILES[_OF_TOKENIZERS].split())
    try:
        files = [(name, file) for name in listed if (file := Path(tokenizer, name)).is_file()]
        if files:
            return _digest(files)
    except OSError as error:
        log.warning("kvoffload: %s cannot be read, so starts are cold: %s", tokenizer, error)
    return f"known to this process alone: {uuid.uuid4().hex}"


def generation_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out of a model's generation config what is read only after the KV is computed."""
    harmless = names(_HARMLESS_OF_GENERATION)
    return {name: value for name, value in settings.items() if name not in harmless}


def adapter_digest(folder: str | os.PathLike[str]) -> str | None:
    """Digest an adapter's folder by content; None where nothing tells."""
    return folder_digest(Path(folder)) if Path(folder).is_dir() else None


def changes_of(folder: str | os.PathLike[str]) -> tuple[Any, ...]:
    """Return what differs after a file of a folder was written or replaced; raises OSError."""
    return tuple(
        (file.name, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)
        for _, file in _named(Path(folder))
        if (facts := os.stat(file))
    )


def was_changed(folder: str, since_ns: int) -> bool:
    """Tell whether a model was written after a time: earlier files may have been loaded.

    A link that leads elsewhere since, another folder under the name and a file that is gone count
    as well. A folder further up that was renamed does not show.
    """
    path = Path(folder)
    try:
        times = [ctime_ns for *_, ctime_ns, _ in changes_of(path)]
        times += [os.stat(path).st_ctime_ns, os.stat(path.parent).st_ctime_ns * path.is_file()]
        links = (each for each in (path.absolute(), *path.absolute().parents) if each.is_symlink())
        times += [os.lstat(link).st_ctime_ns for link in links]
    except OSError:  # it vanishes, which its digest says, or it is a name on a hub
        return False
    changed = any(ctime_ns > since_ns for ctime_ns in times)
    if changed:
        log.warning("kvoffload: files in %s were written after this engine had started", folder)
    return changed


def _named(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files that may change what a model computes, with their names in its folder.

    Of its subfolders, where some keep an encoder, only weights, settings and code count.
    """
    if folder.is_file():
        yield folder.name, folder
        return
    listed, harmless = sorted(folder.iterdir()), names(_HARMLESS_FILES)
    for file in listed:
        is_hidden = file.name.startswith(".") or file.suffix.lower() in _ENDINGS_FOR_PEOPLE
        if not is_hidden and file.name.lower() not in harmless and _is_file(file):
            yield file.name, file
    tokenizers = _HARMLESS_FILES[_OF_TOKENIZERS].split()
    for inner in listed:
        if inner.is_dir() and not _HARMLESS_FOLDERS.fullmatch(inner.name):
            for file in sorted(inner.iterdir()):
                is_counted = file.suffix in _COUNTED_BELOW and file.name not in tokenizers
                if is_counted and _is_file(file):
                    yield f"{inner.name}/{file.name}", file


def _is_file(file: Path) -> bool:
    """Whether it is a file or leads to one: hubs keep files elsewhere."""
    try:
        return stat.S_ISREG(os.stat(file).st_mode)
    except OSError:
        if file.is_symlink() and file.suffix not in _WEIGHTS:
            return False  # a cache of a hub keeps links to files that were not fetched
        raise


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    """Digest files with their names; raises OSError."""
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(_framed(os.fsencode(name)) + _framed(_told(file).encode()))
    return digest.hexdigest()


def _told(file: Path) -> str:
    return _generation_digest(file) if file.name == _GENERATION else file_digest(file)


def _generation_digest(file: Path) -> str:
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return file_digest(file)
    if not isinstance(settings, dict):
        return file_digest(file)
    return json.dumps(generation_facts(settings), sort_keys=True)


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data
