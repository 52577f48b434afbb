"""``kvoffload doctor``: are these stores fit to be tiers, and what should be changed?"""

import json
import os
from typing import Annotated

import typer

from kvoffload.backends.admin import Finding, hung
from kvoffload.cli.config_command import (
    OF_SERVER,
    Engine,
    ForEngine,
    all_given,
    checked,
    examined,
    print_json,
)
from kvoffload.cli.output import console, plain, say, table_of
from kvoffload.cli.server_check import is_of_server, server_findings
from kvoffload.cli.stores import AsJson, Kind, Settings, Target, look_at, run_on
from kvoffload.errors import ConfigError
from kvoffload.io.service.listener import lock_of
from kvoffload.io.service.settings import read_serve_config

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def command(
    target: Target = None,
    kind: Kind = None,
    option: Settings = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|JSON",
            help="Instead of a store: the settings of an engine, or of `kvoffload serve`. Every "
            "tier is examined.",
        ),
    ] = None,
    engine: ForEngine = Engine.VLLM,
    as_json: AsJson = False,
) -> None:
    """Examine a store, or all tiers of an engine's or a server's settings, with remedies.

    It tries reachability, settings, rights and speed. Of a server's socket it tries to attach, and
    uses no store. Nothing that is stored is changed, evicted or repaired. Run it as the user of the
    engines.

    Exit codes: 0 fit, perhaps with warnings; 1 something failed; 2 wrong usage or settings.
    """
    if config is not None:
        if target or kind or option:
            remedy = "names all stores: leave target, --type and -o out"
            raise ConfigError("--config", config, remedy)
        findings = _of_settings(config, engine, as_json)
    else:
        findings = _of_store(target, kind, option)
        if as_json:
            print(json.dumps({"findings": [finding._asdict() for finding in findings]}))
        else:
            _show(findings)
    if any(finding.verdict == "failed" for finding in findings):
        raise typer.Exit(1)


def _of_store(target: str | None, kind: str | None, option: list[str] | None) -> list[Finding]:
    """Examine one store. A path with nothing there may be meant as a folder or as a socket."""
    if target and not kind:
        try:
            look_at(target)
        except TimeoutError as error:
            return [hung(error)]
        if is_of_server(target):
            findings = server_findings(target)
            if any(map(os.path.lexists, (target, lock_of(target)))):
                return findings
            more = f"; a disk tier begins with an empty folder: mkdir -p -m 700 {target}"
            return [each._replace(remedy=each.remedy + more) for each in findings]  # below /run
    try:
        return run_on("doctor", target, kind, option, lambda store: store.diagnose())
    except ConfigError as error:
        if kind or not target or not error.remedy.startswith("does not exist"):
            raise
        remedy = f"{error.remedy}; a server's socket is there once kvoffload serve runs"
        raise ConfigError(error.field, error.value, remedy) from None


def _of_settings(given: str, engine: Engine, as_json: bool) -> list[Finding]:
    """Examine every tier of the settings, print the findings and return all of them."""
    whole, source = all_given(given, engine)
    warnings: list[str] = []
    if OF_SERVER in whole:
        served = read_serve_config(whole)
        by_tier = examined(served.socket, served.backends)
    else:
        config, warnings = checked(whole, source, engine)
        by_tier = examined(config.serve, config.backends)
    if as_json:
        print_json(warnings, by_tier)
    else:
        say(*(f"warning: {warning}" for warning in warnings))
        if not by_tier:
            say("the settings name no tier: there is nothing to examine")
        for name, tier in by_tier.items():
            say(name)
            _show(tier)
    return [each for tier in by_tier.values() for each in tier]


def _show(findings: list[Finding]) -> None:
    rows = [
        (check, plain(verdict, _COLOURS[verdict]), detail, remedy)
        for check, verdict, detail, remedy in findings
    ]
    console().print(table_of(("check", "verdict", "found", "what to do"), rows))
