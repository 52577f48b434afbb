"""Where the source of an engine reads fields of its configuration, found by its syntax."""

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

Readings = dict[str, dict[str, list[str]]]
"""For each name, the modules that read it, with the function and the line of each place."""


def readings(root: Path, parts: Iterable[str], owners: Mapping[str, set[str]]) -> Readings:
    """Find each place in parts of a package that reads one of some fields.

    A field is read as an attribute, or by ``getattr``, and a variable of ``envs`` by its name in
    quotes as well. A name of one word belongs to many things:
    it counts where its owner has the name of a configuration, or was one when it got its name. A
    name of several words counts wherever an object other than ``self`` has it: ``self`` has a copy,
    whose reading was found.

    Args:
        root: the folder of the package.
        parts: files and folders in it.
        owners: the names of each field's configurations, as ``model_config``.
    """
    mentioned = _Mentions(owners)
    found: Readings = defaultdict(lambda: defaultdict(list))
    for file in _files(root, parts):
        text = file.read_text()
        if mentioned(text):
            module = file.relative_to(root).as_posix()
            for name, place in _Module(text, owners).readings():
                found[name][module].append(place)
    return found


class _Mentions:
    """Whether a file may read a field: most need not be parsed."""

    def __init__(self, owners: Mapping[str, set[str]]) -> None:
        words = "|".join(sorted(name for name in owners if "_" in name))
        self.names = re.compile(rf"""[.\"'](?:{words})\b""")
        self.of_one_word = [(name, each) for name, each in owners.items() if "_" not in name]

    def __call__(self, text: str) -> bool:
        return bool(self.names.search(text)) or any(
            any(own in text for own in owners) and re.search(rf"""[."']{name}\b""", text)
            for name, owners in self.of_one_word
        )


def _files(root: Path, parts: Iterable[str]) -> Iterator[Path]:
    for part in parts:
        path = root / part
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path] * path.exists()


class _Module:
    def __init__(self, text: str, owners: Mapping[str, set[str]]) -> None:
        self.tree, self.owners = ast.parse(text), owners
        self.configurations = {each for several in owners.values() for each in several}
        self.aliases: dict[str, set[str]] = defaultdict(set)

    def readings(self) -> Iterator[tuple[str, str]]:
        found: list[tuple[str, str, str]] = []
        self._walk(self.tree, "", found)
        for name, owner, place in found:
            if self._is_configuration(name, owner):
                yield name, place

    def _walk(self, node: ast.AST, inside: str, found: list[tuple[str, str, str]]) -> None:
        for child in ast.iter_child_nodes(node):
            kind = type(child)
            if kind is ast.Name:
                continue
            if kind is ast.Constant:
                if isinstance(child.value, str) and "envs" in self.owners.get(child.value, ()):
                    found.append((child.value, "envs", f"{inside}:{child.lineno}"))
                continue
            here = inside
            if kind in (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
                here = f"{inside}.{child.name}" if inside else child.name
            elif kind in (ast.Attribute, ast.Call):
                if (read := _reading(child)) and read[0] in self.owners:
                    found.append((*read, f"{inside}:{child.lineno}"))
            elif kind in (ast.Assign, ast.NamedExpr, ast.arg):
                self._learn(child)
            self._walk(child, here, found)

    def _learn(self, node: ast.AST) -> None:
        """Note what else a configuration is called in this module."""
        if isinstance(node, ast.Assign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if (owner := _owner(node.value)) in self.configurations:
                for target in targets:
                    self.aliases[_owner(target)].add(owner)
        elif isinstance(node, ast.arg) and node.annotation is not None:
            words = re.findall(r"[A-Za-z]+", ast.unparse(node.annotation))
            for each in self.configurations & {_snake(word) for word in words}:
                self.aliases[node.arg].add(each)

    def _is_configuration(self, name: str, owner: str) -> bool:
        owners = self.owners[name]
        is_one = owner.endswith(tuple(owners)) or bool(self.aliases.get(owner, set()) & owners)
        return is_one or ("_" in name and owner != "self")


def _reading(node: ast.AST) -> tuple[str, str] | None:
    """Return the name that is read, and what its owner is called."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return node.attr, _owner(node.value)
    if isinstance(node, ast.Call) and (name := _asked(node)):
        return name, _owner(node.args[0])
    return None


def _asked(call: ast.Call) -> str:
    """Return the name in ``getattr(owner, name)``."""
    is_getattr = isinstance(call.func, ast.Name) and call.func.id == "getattr"
    name = call.args[1] if is_getattr and len(call.args) > 1 else None
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""


def _owner(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.NamedExpr):
        return _owner(node.value)
    if isinstance(node, ast.Call):
        return _asked(node) or re.sub("^get_(current_|global_)?", "", _owner(node.func))
    return ""


def _snake(word: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word).lower()


def new_places(found: Readings, known: Mapping[str, Collection[str]]) -> list[str]:
    """Return a line for each module that reads a field and is not known to."""
    return [
        f"{name}: {module} ({', '.join(places)})"
        for name, modules in sorted(found.items())
        for module, places in sorted(modules.items())
        if module not in known.get(name, ())
    ]


def places_of(file: str) -> dict[str, frozenset[str]]:
    """Return the modules that are known to read each field, from the text beside a module."""
    lines = Path(file).with_suffix(".txt").read_text().splitlines()
    told = (line.partition(": ") for line in lines)
    return {name: frozenset(modules.split()) for name, _, modules in told}
