"""Facts of an engine's configuration, by exclusion: each field that is not known to be harmless.

A list of what matters misses the option that the next version of an engine brings. So a connector
lists the fields that change no byte of a KV cache, and each other field is a fact. An unknown field
makes a store cold, never wrong.
"""

import dataclasses
import enum
import hashlib
import json
import logging
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any

from kvoffload.identity import Fact

log = logging.getLogger(__name__)

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
_SECRET = re.compile(
    r"(api_?key|access_key|secret|passw|credential|auth_?token|token\Z)", re.IGNORECASE
)
"""In the name of a fact: its value is not kept readable with the data."""
_USER_IN_URL = re.compile(r"://[^/\s]*@")
_DEEPEST = 40
"""Configurations nest a few levels; what is deeper contains itself."""
OF_PRECISION = frozenset(
    {
        "CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATE_SINGLE_PRECISION",
        "DNNL_DEFAULT_FPMATH_MODE", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_F32_DEFAULT",
    }
)  # fmt: skip
"""Variables by which cuBLAS, oneDNN, Torch and Triton multiply 32-bit floats with fewer bits. No
source of an engine names them."""
_MOST_BITS = 1024
"""Python spells no number of thousands of digits."""


def facts_of(
    config: Any, harmless: Collection[str] = (), prefix: str = "", depth: int = 0
) -> dict[str, Fact]:
    """Return each field of a configuration as a fact; those of a configuration in it as well.

    Args:
        config: an object with fields (a dataclass, a struct, a plain object), or a mapping.
        harmless: dotted names of fields that are left out, with all that is in them.
        prefix: what the names of the facts begin with, and those of ``harmless`` too.
        depth: of configurations around this one.
    """
    facts: dict[str, Fact] = {}
    for name, value in _fields(config):
        full = f"{prefix}{name}"
        if full in harmless:
            continue
        if depth < _DEEPEST and _is_configuration(value):
            facts[full] = type(value).__qualname__
            facts |= facts_of(value, harmless, f"{full}.", depth + 1)
        else:
            facts[full] = fact(full, value)
    return facts


def fact(name: str, value: Any) -> Fact:
    """Return a value as a fact: as it is, or spelled alike in each process.

    What has no such spelling, as a function without a name, is a fact that no other process has.
    """
    try:
        value = _hidden(name, value)
        if type(value) is str:
            return _encodable(value)
        if value is None or isinstance(value, bool):
            return value
        if type(value) is int and value.bit_length() <= _MOST_BITS:
            return value
        plain = _plain(value, 0)
        return _encodable(plain) if isinstance(plain, str) else json.dumps(plain, sort_keys=True)
    except Exception as error:  # a property of a stranger's class may raise anything
        log.warning(
            "kvoffload: nothing tells the value of %s apart (%s), so NOTHING STORED WILL BE FOUND "
            "after a restart or by another instance.",
            name,
            error,
        )
        return f"known to this process alone: {uuid.uuid4().hex}"


def names(listed: Mapping[str, str]) -> frozenset[str]:
    """Return the names of a list that gives, for each reason, names with blanks between them.

    A word that ends with a dot begins all names after it, up to the next such word.
    """
    found: set[str] = set()
    for text in listed.values():
        front = ""
        for word in text.split():
            if word.endswith("."):
                front = word
            else:
                found.add(front + word)
    return frozenset(found)


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(config, Mapping):
        return iter(sorted((str(name), value) for name, value in config.items()))
    if dataclasses.is_dataclass(config):
        listed: Sequence[str] = [field.name for field in dataclasses.fields(config)]
    else:
        listed = getattr(config, "__struct_fields__", ()) or sorted(vars(config))
    return ((name, getattr(config, name, None)) for name in listed)


def _is_configuration(value: Any) -> bool:
    # Those of transformers have more than their fields; to_dict shows all. The class is asked: a
    # stranger's object may answer anything, and raise.
    kind = type(value)
    has_fields = dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__")
    return has_fields and kind is not type and not hasattr(kind, "to_dict")


def _plain(value: Any, depth: int) -> Any:
    """Return a value as JSON has it, alike in each process; raises ValueError where none is."""
    if depth > _DEEPEST:
        raise ValueError("contains itself")
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, str):
        return str(_hidden("", value))
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {
            _key(name, depth): _plain(_hidden(str(name), inner), depth + 1)
            for name, inner in value.items()
        }
    if isinstance(value, Set):
        return sorted(json.dumps(_plain(each, depth + 1), sort_keys=True) for each in value)
    if isinstance(value, Sequence):
        return [_plain(each, depth + 1) for each in value]
    if isinstance(value, type):
        return _name_of_code(value)
    if hasattr(value, "tolist"):  # an array: its text leaves the middle out
        return [str(value.dtype), _plain(value.tolist(), depth + 1)]
    if isinstance(value, re.Pattern):  # its text ends after 200 characters
        return [value.pattern, value.flags]
    if hasattr(value, "to_dict"):  # a configuration of transformers
        return [type(value).__qualname__, _plain(value.to_dict(), depth + 1)]
    if _is_configuration(value):
        return [type(value).__qualname__, _plain(dict(_fields(value)), depth + 1)]
    if callable(value):
        return _name_of_code(value)
    text = str(value)
    if not _ADDRESS.search(text):
        return text
    if not hasattr(value, "__dict__"):
        raise ValueError(f"{type(value).__qualname__} shows nothing but its address")
    return [type(value).__qualname__, _plain(vars(value), depth + 1)]


def _hidden(name: str, value: Any) -> Any:
    """Return a digest in place of a secret: facts are kept readable with the data."""
    is_secret = bool(_SECRET.search(name)) and value and not isinstance(value, bool | int | float)
    if not is_secret and not (isinstance(value, str) and _USER_IN_URL.search(value)):
        return value
    text = value if isinstance(value, str) else json.dumps(_plain(value, 0), sort_keys=True)
    return f"sha256 {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]}"


def _encodable(text: str) -> str:
    """Return a text that UTF-8 has, as names of files and variables may not be."""
    data = text.encode(errors="surrogatepass")
    return text if data == text.encode(errors="replace") else f"no UTF-8: {data.hex()}"


def _key(name: Any, depth: int) -> str:
    # A number and its text are two keys.
    return name if type(name) is str else "\0" + json.dumps(_plain(name, depth + 1))


def _name_of_code(value: Any) -> str:
    name = getattr(value, "__qualname__", "<")
    if "<" in name:  # a lambda, a function in a function, an object that can be called
        raise ValueError("it is code without a name of its own")
    return f"{value.__module__}.{name}"
