"""Write the reference pages from the code: settings, metrics, counters, the command line.

``python tools/reference.py`` writes the pages in ``docs/reference``. With ``--check`` it changes
nothing, and exits with 1 if a page differs. Texts that the code lacks are in ``reference.toml``.
"""

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
GENERATED = "<!-- Written by tools/reference.py from the code: change the code, then run it. -->"
TYPES = {
    "ByteSize": "size",
    "bool": "true or false",
    "float": "number",
    "int": "whole number",
    "str": "text",
    "tuple": "list",
}


def main() -> int:
    """Write the pages, or compare them."""
    check = "--check" in sys.argv[1:]
    differing = [page for page, text in pages().items() if not _same(page, text, check)]
    for page in differing:
        print(f"{page.relative_to(ROOT)} differs from the code: run python tools/reference.py")
    return min(len(differing), 1)


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    makers: dict[str, Callable[[], Iterator[str]]] = {
        "settings.md": settings,
        "metrics.md": metrics,
        "counters.md": counters,
        "command-line.md": command_line,
    }
    return {PAGES / name: tidy("\n".join(make())) for name, make in makers.items()}


def _same(page: Path, text: str, check: bool) -> bool:
    if not check:
        page.write_text(text)
        return True
    return page.exists() and page.read_text() == text


def tidy(text: str) -> str:
    """Leave one empty line between blocks, and one line break at the end."""
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@cache
def texts() -> dict[str, Any]:
    """Read the texts that the code lacks."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


# ---- settings ----


def settings() -> Iterator[str]:
    """Yield the lines of the page of settings."""
    from kvoffload.backends.key_files import Encryption
    from kvoffload.config import OffloadConfig
    from kvoffload.connectors.sglang.hicache_settings import HiCacheSettings
    from kvoffload.connectors.vllm.start import VllmConfigSettings
    from kvoffload.io.service.settings import ServeConfig

    yield from _begin(
        "Settings",
        """
An engine reads these settings at its start. An unknown key or a wrong value ends the start with an
error that names the field, the value and the remedy. A size is a number of bytes or a text such as
`"8GiB"` or `"200 GB"`. Settings that end in `_s` are seconds.
""",
    )
    yield from _section(
        "Engine",
        """
Under vLLM these keys are in `kv_connector_extra_config`, under SGLang in
`--hicache-storage-backend-extra-config`; `LocalConnector` takes them as a dictionary. A setting
that the dictionary lacks may come from the environment, as `KVOFFLOAD_SETTING_` and its name in
upper case: JSON, or plain text that begins with no `[` or `{`. What both lack may come from the
TOML, JSON or YAML file that `KVOFFLOAD_CONFIG` names. A list is taken whole from one of them.

[`kvoffload config`](command-line.md#kvoffload-config) checks settings, shows where each comes from,
and prints their JSON Schema. Passwords belong in the variable or file that `password_env` and
`password_file` name; one in a URL is refused.
""",
    )
    yield from struct_fields(OffloadConfig)
    yield from _section("vLLM only", "The same object takes these keys under vLLM.")
    engine = set(OffloadConfig.__struct_fields__)
    yield from struct_fields(VllmConfigSettings, leave_out=engine)
    yield from _section(
        "SGLang only",
        """
`--hicache-storage-backend-extra-config` takes these keys, and `backends`, `serve`, `io`,
`staging_bytes`, `load_timeout_s`, `store_timeout_s` and `lookup_timeout_s`. The timeouts are of one
call of SGLang. Pages of side pools that are read with KV pages share their time. Loads and lookups
have at most 8 s: SGLang ends itself if it empties its caches while a call lasts for 10 s.
""",
    )
    yield from struct_fields(HiCacheSettings, leave_out=engine)
    yield from _section(
        "Encryption of a tier",
        """
Any tier of type `disk`, `folder`, `redis` or `object`, and plug-ins that can, take
`"encryption": {…}` next to their `type`. [The guide](../guides/encryption.md) says how to make and
change keys. By default chunks are not encrypted.
""",
    )
    yield from struct_fields(Encryption, "encryption: ")
    for name, options in sorted(_backend_options().items()):
        yield from _section(
            f"Backend `{name}`",
            f"""
These keys are next to `"type": "{name}"` in an entry of `backends`.
""",
        )
        yield from struct_fields(options, f"{name}: ")
    yield from _section(
        "Server of a host",
        """
`kvoffload serve --config FILE` reads these keys. [The guide](../guides/serve.md) says how to choose
them.
""",
    )
    yield from struct_fields(ServeConfig, "server: ")
    yield from _section(
        "Hints of a request",
        """
A client sends hints in `kv_transfer_params`, under `kvoffload`. The setting `client_hints` names
the hints that requests may use. An unknown hint, or a request with more than 16 hints, is ignored
and counted. A second tier of one type has its place in its name: `disk1`.
""",
    )
    yield from table(
        ("hint", "default", "meaning"),
        ((f"`{name}`", *row) for name, row in texts()["hints"].items()),
    )


def _backend_options() -> dict[str, Any]:
    """Return the settings of the backends in this package; plug-ins have their own pages."""
    found = {}
    for point in entry_points(group="kvoffload.backends"):
        if point.module.startswith("kvoffload."):
            found[point.name] = point.load().Options
    return found


def struct_fields(struct: Any, title: str = "", leave_out: Iterable[str] = ()) -> Iterator[str]:
    """Yield a section for each field of a struct, with the docstring below it."""
    described = field_texts(struct)
    for field in msgspec.structs.fields(struct):
        if field.name in leave_out:
            continue
        text = described.get(field.name) or texts()["settings"].get(field.name, "")
        default = shown_default(field)
        kind = type_name(field.type) + (", " if field.required else ", default: ") + default
        yield from ("", f"### {title}{field.name}", "", *wrapped(f"*{kind}*"), "", *wrapped(text))


def field_texts(struct: Any) -> dict[str, str]:
    """Return the docstring below each field of a struct, those of its bases included."""
    found: dict[str, str] = {}
    for kind in reversed(struct.__mro__):
        if not kind.__module__.startswith("kvoffload."):
            continue
        body = ast.parse(inspect.getsource(kind)).body[0]
        name = ""
        for statement in body.body if isinstance(body, ast.ClassDef) else ():
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                continue
            value = statement.value if isinstance(statement, ast.Expr) else None
            if name and isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[name] = markdown(value.value)
            name = ""
    return found


def type_name(kind: Any) -> str:
    """Return what a field takes, in words."""
    if get_origin(kind) is Literal:
        return " or ".join(f"`{each}`" for each in get_args(kind))
    parts = [each for each in get_args(kind) if each is not NoneType]
    if hasattr(kind, "__metadata__"):
        return type_name(parts[0])
    if get_origin(kind) in (Union, UnionType):
        return " or ".join([*map(type_name, parts), *["null"] * (NoneType in get_args(kind))])
    name = getattr(getattr(kind, "__origin__", kind), "__name__", str(kind))
    return TYPES.get(name, name)


def shown_default(field: Any) -> str:
    """Return the default of a setting as an operator writes it."""
    from kvoffload.config import ByteSize, human_bytes

    if field.required:
        return "required"
    made = field.default_factory is not msgspec.NODEFAULT
    value = field.default_factory() if made else field.default
    if isinstance(value, ByteSize):
        return human_bytes(value).replace(".0 ", " ")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(f"`{each}`" for each in value) or "none"
    if value is None or value == "":
        return "none"
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"


# ---- metrics ----


def metrics() -> Iterator[str]:
    """Yield the lines of the page of metrics."""
    from kvoffload.metrics.names import METRICS, PREFIX, SERVER_METRICS, Metric

    yield from _begin("Metrics", "What a Prometheus server scrapes, and what the labels mean.")
    yield from _section(
        "Every engine",
        """
They are on vLLM's own page, where the names begin with `vllm:`, and on the page of `metrics_port`.
SGLang's own page has one counter, `sglang:kvoffload_events`, by
[event](counters.md#pages-of-sglang). Counters begin at 0, and end in `_total` where Prometheus
reads them. Histograms end in `_bucket`, `_sum` and `_count`. `LocalConnector.stats()` has them
without `kvoffload_`, by label values: `stats()["lookups"]["disk"]["hit"]`.

Under SGLang the tier `cpu` is the slots between HiCache's host memory and the tiers: it has copies
and bytes in flight, and no capacity. `kvoffload_hit_tokens` counts tokens that tiers brought to
HiCache. `kvoffload_stores_dropped` has an empty `tier`, and `kvoffload_events` counts pages.
""",
    )

    def listed(found: dict[str, Metric]) -> Iterator[str]:
        rows = (
            (f"`{PREFIX}{name}`", m.kind, _codes(m.labels), m.unit, m.text)
            for name, m in found.items()
        )
        return table(("metric", "kind", "labels", "unit", "meaning"), rows)

    yield from listed(METRICS)
    yield from ("", "The labels:", "")
    yield from table(("label", "values"), texts()["metrics"]["labels"])
    yield from _section(
        "The server of a host",
        """
The page of `metrics_port` of [`kvoffload serve`](../guides/serve.md) has these. It also has
`kvoffload_resident_bytes` and `kvoffload_capacity_bytes` of its `memory` and of each backend, and
their counters as `kvoffload_tier_events`. An engine's own page has the whole server's
bytes and counters as those of its tier `serve`. Do not add up those of several engines.
""",
    )
    yield from listed(SERVER_METRICS)
    for part in texts()["metrics"]["sections"]:
        yield from ("", f"## {part['title']}", "", *part["text"].strip().splitlines(), "")
        yield from table(("metric", "meaning"), part["rows"]) if part["rows"] else ()


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# ---- counters and reasons ----


def counters() -> Iterator[str]:
    """Yield the lines of the page of counters and reasons."""
    yield from _begin(
        "Counters and reasons",
        """
Every drop, every miss by error and every eviction is counted with a reason. `…` stands for any
ending.
""",
    )
    for part in texts()["counters"]:
        yield from _section(part["title"], part["text"])
        yield from table(("counter", "meaning", "what to do"), part["rows"])
    yield from _section(
        "Reasons of a miss",
        """
`LocalConnector.explain(request)` names, for each chunk of a request, the tier that has it or the
reason of the miss. Under vLLM the hint `explain` asks for it. The last 32,768 evictions and drops
are remembered; an older one is `never_stored`.
""",
    )
    yield from table(
        ("reason", "meaning", "what to do"),
        ((f"`{name}`", *row) for name, row in texts()["reasons"].items()),
    )


# ---- the command line ----


def command_line() -> Iterator[str]:
    """Yield the lines of the page of commands."""
    from kvoffload.cli.main import COMMANDS

    yield from _begin(
        "Command line",
        """
The commands need the extra `cli`. `kvoffload COMMAND --help` prints the same. Each command takes
`--json` and then prints [JSON](json.md) alone; `config schema` prints nothing else.

Scripts may rely on the exit codes. 0: done, and all is well. 1: the command found something wrong,
or could not do a part; it says what. 2: wrong usage or settings, and nothing was done. 130: ended
by Control-C.
""",
    )
    yield from table(
        ("command", "what it does"),
        ((f"[{name}](#kvoffload-{name})", text) for name, text in COMMANDS.items()),
    )
    for name in COMMANDS:
        yield from _command(f"kvoffload {name}", _click_command(name))


def _click_command(name: str) -> Any:
    import typer

    from kvoffload.cli.main import module_of

    module = module_of(name)
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False)
        app.command(name)(module.command)
    return typer.main.get_command(app)


def _command(title: str, command: Any) -> Iterator[str]:
    """Yield the section of a command, and those of its subcommands."""
    yield from ("", f"## {title}", "")
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(command.help or ""))
    for paragraph in paragraphs:
        yield from (*wrapped(markdown(paragraph)), "")
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    words = [f"{{{a.name}}}" if a.required else f"[{a.name}]" for a in arguments]
    yield from ("```text", " ".join([title, "[OPTIONS]", *words]), "```", "")
    rows = []
    for each in command.params:
        names = each.name if each in arguments else ", ".join((*each.opts, *each.secondary_opts))
        if "--help" not in each.opts:
            rows.append((f"`{names}`", _default(each), markdown(each.help or "")))
    yield from table(("argument or option", "default", "meaning"), rows)
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _command(f"{title} {name}", inner)


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if isinstance(value, Enum):
        value = value.value
    if value is None or value is False or value in ((), [], ""):
        return "–"
    return f"`{value}`"


# ---- Markdown ----


def _begin(title: str, text: str) -> Iterator[str]:
    yield from (f"# {title}", "", GENERATED, "", *text.strip().splitlines(), "")


def _section(title: str, text: str) -> Iterator[str]:
    yield from ("", f"## {title}", "", *wrapped(text), "")


def wrapped(text: str) -> list[str]:
    """Wrap prose at 100 columns."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > 100:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        cells = (" ".join(cell.split()).replace("|", r"\|") for cell in row)
        yield f"| {' | '.join(cells)} |".replace("|  |", "| |")


def markdown(text: str) -> str:
    """Turn the markup of a docstring into Markdown, on one line."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return " ".join(text.split())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
