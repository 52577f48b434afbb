"""``kvoffload config``: are these settings right, what is in force, and what may they be?"""

import asyncio
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from importlib.metadata import entry_points
from typing import Annotated, Any

import msgspec
import typer

from kvoffload.backends.admin import Finding
from kvoffload.backends.key_files import ENCRYPTION, Encryption, without
from kvoffload.cli.output import console, say, table_of
from kvoffload.cli.server_check import server_findings
from kvoffload.cli.stores import AsJson, opened
from kvoffload.config import (
    SIZE_SCHEMA,
    BackendConfig,
    ByteSize,
    OffloadConfig,
    human_bytes,
    parse_config,
)
from kvoffload.config_sources import gather, read_file
from kvoffload.connectors.sglang.hicache_settings import (
    CLASS,
    NOT_HERE,
    OF_SGLANG,
    HiCacheSettings,
    gather_settings,
)
from kvoffload.connectors.vllm.start import VllmConfigSettings
from kvoffload.errors import HIDDEN, ConfigError, shown
from kvoffload.registry import BACKENDS, can_encrypt, check_plugins, load, offers

app = typer.Typer(
    help="Check, show or describe the settings of an engine.\n\n"
    "Exit codes: 0 done; 1 a tier failed; 2 a setting is wrong.",
    no_args_is_help=True,
    add_completion=False,
)


class Engine(Enum):
    """Whose settings they are."""

    VLLM = "vllm"
    SGLANG = "sglang"
    LOCAL = "local"


SETTINGS: dict[Engine, type[OffloadConfig]] = {
    Engine.VLLM: VllmConfigSettings,
    Engine.SGLANG: HiCacheSettings,
    Engine.LOCAL: OffloadConfig,
}
Given = Annotated[
    str | None,
    typer.Argument(
        metavar="[FILE|JSON]",
        help="A TOML, JSON or YAML file; or the engine's dictionary as JSON, also the whole of "
        "vLLM's --kv-transfer-config, or of SGLang's --hicache-storage-backend-extra-config. By "
        "default, the environment alone.",
    ),
]
ForEngine = Annotated[Engine, typer.Option("--engine", help="Whose settings they are.")]
OF_SERVER = "socket"
"""A setting of each server, and of no engine."""
_INNER = "kv_connector_extra_config"


@app.command()
def check(
    given: Given = None,
    engine: ForEngine = Engine.VLLM,
    probe: Annotated[
        bool, typer.Option("--probe", help="Examine each tier as `kvoffload doctor` does.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check all settings, those of each tier among them, as an engine does at its start.

    Without --probe no store is opened. With it nothing that is stored is changed.

    Exit codes: 0 right, perhaps with warnings; 1 a tier failed; 2 a setting is wrong.
    """
    config, warnings = checked(*all_given(given, engine), engine)
    findings = examined(config.serve, config.backends) if probe else {}
    failed = [
        name for name, tier in findings.items() if any(each.verdict == "failed" for each in tier)
    ]
    if as_json:
        print_json(warnings, findings)
    else:
        say(*(f"warning: {warning}" for warning in warnings))
        for name, tier in findings.items():
            for each in tier:
                told = "; ".join(filter(None, (each.detail, each.remedy)))
                say(f"{name}: {each.check} {each.verdict}: {told}")
        say(_verdict(config, failed))
    if failed:
        raise typer.Exit(1)


def _verdict(config: OffloadConfig, failed: list[str]) -> str:
    if failed:
        return f"no setting is wrong, but a tier failed: {', '.join(failed)}"
    named = ["serve"] if config.serve else [tier.type for tier in config.backends]
    tiers = ", ".join(named) or "none"
    host = human_bytes(config.host_memory[1])
    return f"the settings are right; host memory: {host}, tiers: {tiers}"


def print_json(warnings: list[str], findings: Mapping[str, list[Finding]]) -> None:
    """Print what was found of each tier, and what to warn of."""
    found = {name: [each._asdict() for each in tier] for name, tier in findings.items()}
    print(json.dumps({"warnings": warnings, "tiers": found}))


def checked(
    whole: Mapping[str, Any], source: str, engine: Engine
) -> tuple[OffloadConfig, list[str]]:
    """Read what was given as an engine does at its start; return it, and what to warn of.

    Raises:
        ConfigError: a setting is wrong.
    """
    config, _ = _read(whole, source, engine)
    check_plugins(config)
    return config, list(_of_sglang(whole) if engine is Engine.SGLANG else _warnings(whole))


@app.command()
def show(given: Given = None, engine: ForEngine = Engine.VLLM, as_json: AsJson = False) -> None:
    """Show each setting in force, and where it comes from. Secrets are hidden.

    What each tier is given is shown as it is; ``check`` says whether it is right.

    Exit codes: 0 shown; 2 a setting is wrong.
    """
    config, sources = _read(*all_given(given, engine), engine)
    rows = [
        (field.name, _plain_data(field.name, getattr(config, field.name)))
        for field in msgspec.structs.fields(config)
        if engine is not Engine.SGLANG or field.name not in NOT_HERE
    ]
    if as_json:
        told = {
            name: {"value": value, "source": sources.get(name, "default")} for name, value in rows
        }
        print(json.dumps(told))
        return
    cells = [
        (
            name,
            human_bytes(value) if name.endswith("_bytes") and value else json.dumps(value),
            sources.get(name, "default"),
        )
        for name, value in rows
    ]
    console().print(table_of(("setting", "value", "from"), cells))


@app.command()
def schema(engine: ForEngine = Engine.VLLM) -> None:
    """Print the JSON Schema of the settings, with those of each installed backend.

    Exit codes: 0 printed.
    """
    found = json_schema(SETTINGS[engine])
    if engine is Engine.SGLANG:
        keys = found["$defs"][HiCacheSettings.__name__]["properties"]
        for name in NOT_HERE:
            keys.pop(name, None)  # some are of other storages
        keys |= {name: {} for name in sorted(OF_SGLANG)}
    print(json.dumps(found, indent=2))


def json_schema(settings: type[OffloadConfig]) -> dict[str, Any]:
    """Return the JSON Schema of the settings; tiers are objects by their type."""
    types = sorted({point.name for point in entry_points(group=BACKENDS)})
    factories = [load(BACKENDS, name) for name in types]
    options = [_with_plain_defaults(factory.Options) for factory in factories]
    schemas, parts = msgspec.json.schema_components(
        [settings, *options, Encryption],
        schema_hook=_size,
        ref_template="#/$defs/{name}",
    )
    *tiers, encryption = schemas[1:]
    for name, factory, reference in zip(types, factories, tiers, strict=True):
        part = parts[reference["$ref"].rpartition("/")[2]]
        part["properties"] = {"type": {"const": name}, **part["properties"]}
        if can_encrypt(factory):
            part["properties"][ENCRYPTION] = encryption
        part["required"] = ["type", *part.get("required", ())]
        part["additionalProperties"] = False
    parts[BackendConfig.__name__] = {"anyOf": tiers}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schemas[0],
        "$defs": parts,
    }


def _with_plain_defaults(options: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a struct of the same fields, whose defaults a schema can show."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(options):
        default = int(field.default) if isinstance(field.default, ByteSize) else field.default
        either: dict[str, Any] = {"default": default, "default_factory": field.default_factory}
        fields.append((field.encode_name, field.type, msgspec.field(**either)))
    return msgspec.defstruct(options.__name__, fields, kw_only=True)


def _size(kind: type) -> dict[str, Any]:
    """Return the schema of a type that msgspec does not know."""
    if issubclass(kind, ByteSize):
        return SIZE_SCHEMA
    raise NotImplementedError(kind)


def all_given(given: str | None, engine: Engine) -> tuple[dict[str, Any], str]:
    """Return all settings that were given, of an engine or a server, and where they are from."""
    source = "the command line"
    if given is None:
        return {}, source
    if given.lstrip().startswith("{"):
        try:
            return json.loads(given), source
        except (ValueError, RecursionError) as error:
            size = f"{len(given)} characters"  # a password may stand in them
            raise ConfigError("JSON", size, f"is damaged: {error}") from None
    given = given.removeprefix("@") if engine is Engine.SGLANG else given  # as SGLang has it
    return read_file(given), given


def _read(
    whole: Mapping[str, Any], source: str, engine: Engine
) -> tuple[OffloadConfig, dict[str, str]]:
    """Return the settings, and the source of each."""
    if OF_SERVER in whole:
        remedy = "has the settings of a server; kvoffload serve --config FILE --check reads them"
        raise ConfigError("settings", source, remedy)
    kind = SETTINGS[engine]
    if engine is Engine.SGLANG:
        settings, sources = gather_settings(whole, source)
        return parse_config(settings, kind), sources
    extra = whole.get(_INNER, {}) if _INNER in whole or "kv_connector" in whole else whole
    settings, sources = gather(extra, kind.__struct_fields__, source=source)
    return parse_config(settings, kind), sources


def _warnings(whole: Mapping[str, Any]) -> Iterator[str]:
    if "kv_connector" not in whole:
        return
    if whole["kv_connector"] != "KVOffloadConnector":
        yield f"kv_connector is {whole['kv_connector']!r}: this is KVOffloadConnector's check"
    if whole.get("kv_load_failure_policy") != "recompute":
        yield 'without "kv_load_failure_policy": "recompute" a failed load fails its request'


def _of_sglang(extra: Mapping[str, Any]) -> Iterator[str]:
    if not extra:  # the settings are in the environment
        return
    for name, value in CLASS.items():
        if extra.get(name) != value:
            yield f"SGLang finds kvoffload only by {json.dumps(name)}: {json.dumps(value)}"
    if "backend_name" not in extra:
        yield 'SGLang wants a name for its storage, such as "backend_name": "kvoffload"'
    if not extra.get("interface_v1"):
        yield 'without "interface_v1": 1 SGLang makes one more copy of each page'


def examined(server: str | None, backends: Sequence[BackendConfig]) -> dict[str, list[Finding]]:
    """Examine a server by its socket, and each tier, as far as its backend offers it."""
    findings = {f"serve {server}": server_findings(server)} if server else {}
    for i, tier in enumerate(backends):
        name = f"backends[{i}] {tier.type}"
        if not offers(tier.type, "doctor"):
            findings[name] = [Finding("doctor", "ok", "this backend has no examination", "")]
            continue
        try:
            findings[name] = asyncio.run(
                opened("doctor", tier.type, tier.options, lambda store: store.diagnose())
            )
        except ConfigError as error:
            findings[name] = [Finding(error.field, "failed", f"{error.value!r}", error.remedy)]
        except OSError as error:
            failed = Finding("reachable", "failed", str(error), "check address, rights and path")
            findings[name] = [failed]
    return findings


def _plain_data(name: str, value: Any) -> Any:
    """Return a setting as JSON has it, without its secrets."""
    if name == "backends":
        return [{"type": tier.type, **shown_options(tier)} for tier in value]
    if isinstance(value, ByteSize):
        return int(value)
    return shown(list(value) if isinstance(value, tuple) else value, name)


def shown_options(tier: BackendConfig) -> dict[str, Any]:
    """Return a tier's options without their secrets, which may be under any unknown name."""
    try:
        known = load(BACKENDS, tier.type).Options.__struct_encode_fields__
    except ConfigError:
        known = ()
    options = _of_known(without(tier.options), known)
    if isinstance(keys := tier.options.get(ENCRYPTION), Mapping):
        options[ENCRYPTION] = _of_known(keys, Encryption.__struct_encode_fields__)
    return options


def _of_known(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    return {name: shown(each, name) if name in known else HIDDEN for name, each in options.items()}
