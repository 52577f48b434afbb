"""The manifest of a namespace folder: the facts behind its name, for people."""

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from kvoffload.backends.disk.paths import MANIFEST
from kvoffload.backends.disk.vfs import Vfs
from kvoffload.backends.header import namespace_digest

MOST_BYTES = 1 << 20


def _text(namespace: str, facts: Mapping[str, str]) -> bytes:
    manifest = {"format": 1, "namespace": namespace, "facts": dict(facts)}
    return (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode()


def read(vfs: Vfs, folder: str) -> dict[str, Any]:
    """Return the manifest in a folder; empty if there is none that can be read."""
    try:
        found = json.loads(vfs.read_file(f"{folder}/{MANIFEST}", MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write(
    vfs: Vfs, folder: str, namespace: str, facts: Mapping[str, str], temporary: Callable[[], str]
) -> None:
    """Write name and facts of a namespace once; facts replace a name alone. Raises OSError.

    ``temporary`` returns the path of the file that becomes the manifest.
    """
    target = f"{folder}/{MANIFEST}"
    with contextlib.suppress(FileNotFoundError):
        present = bytes(vfs.read_file(target, MOST_BYTES))
        if not facts or present != _text(namespace, {}):
            return
    vfs.replace_file(target, temporary(), _text(namespace, facts))


def name_in(manifest: Mapping[str, Any], folder: str) -> str:
    """Return the namespace that a manifest names; the folder's own name if it is not that one's.

    The folder's name is the digest of the namespace, so no manifest can claim another folder.
    """
    name = manifest.get("namespace")
    is_its_own = isinstance(name, str) and _folder_of(name) == folder
    return str(name) if is_its_own else folder


def facts_in(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts that a manifest tells, without those that are no text."""
    facts = manifest.get("facts")
    pairs = facts.items() if isinstance(facts, dict) else ()
    return {name: value for name, value in pairs if isinstance(value, str)}


def _folder_of(namespace: str) -> str:
    """Return the name of a namespace's folder; empty for a text that no engine can name one by."""
    try:
        return namespace_digest(namespace).hex()
    except UnicodeEncodeError:  # half of a surrogate pair
        return ""
