"""``kvoffload doctor``: is this store fit to be a tier, and what should be changed?"""

import json

import typer
from rich.table import Table

from kvoffload.backends.admin import Finding
from kvoffload.cli.output import console, plain
from kvoffload.cli.stores import AsJson, Kind, Settings, Target, run_on

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def command(
    target: Target = None, kind: Kind = None, option: Settings = None, as_json: AsJson = False
) -> None:
    """Examine a store: reachability, settings, rights, speed; each with a verdict and a remedy.

    Nothing that is stored is changed, evicted or repaired. Run it as the user of the engines.

    Exit codes: 0 fit, perhaps with warnings; 1 something failed; 2 wrong usage or settings.
    """
    findings = run_on("doctor", target, kind, option, lambda store: store.diagnose())
    if as_json:
        print(json.dumps({"findings": [finding._asdict() for finding in findings]}))
    else:
        _show(findings)
    if any(finding.verdict == "failed" for finding in findings):
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    table = Table()
    for title in ("check", "verdict", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        verdict = plain(finding.verdict, _COLOURS[finding.verdict])
        table.add_row(plain(finding.check), verdict, plain(finding.detail), plain(finding.remedy))
    console().print(table)
