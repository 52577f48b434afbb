"""``--quiet`` and ``--output``, which every command takes: where its standard output goes."""

import io
import os
import sys
from typing import Annotated, Any

import typer

from kvoffload.errors import ConfigError


class Destination:
    """Standard output of one run: as it is, in a file, or nowhere."""

    def __init__(self) -> None:
        self.is_quiet = False
        self._path: str | None = None
        self._kept: io.StringIO | None = None
        self._real = sys.stdout

    def choose(self, *, quiet: bool = False, path: str | None = None) -> None:
        """Keep what is printed from now on, for a file, or for none if nothing names one."""
        if path and (os.path.isdir(path) or not os.access(_made_in(path), os.W_OK)):
            raise ConfigError("output", path, "must be a file that can be written")
        self.is_quiet = self.is_quiet or quiet
        self._path = path or self._path
        if (quiet or path) and self._kept is None:
            self._real, sys.stdout = sys.stdout, io.StringIO()
            self._kept = sys.stdout

    def end(self, *, done: bool) -> None:
        """Write the file if the command did its work; wrong usage leaves an earlier file.

        Raises:
            SystemExit: with code 1 when it cannot be written; the reason is printed.
        """
        if self._kept is None:
            return
        text, path = self._kept.getvalue(), self._path
        sys.stdout = self._real
        self._kept, self._path, self.is_quiet = None, None, False
        if not done or path is None:
            return
        try:
            with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError as error:
            print(f"kvoffload: {path} cannot be written: {error.strerror}", file=sys.stderr)
            sys.exit(1)


destination = Destination()
"""Of this process."""


def _made_in(path: str) -> str:
    """Return what must be writable for a file: itself, or the folder that it is made in."""
    return path if os.path.exists(path) else os.path.dirname(path) or "."


def is_watched() -> bool:
    """Return whether a person sees the progress of the work on standard error."""
    return sys.stderr.isatty() and not destination.is_quiet


def is_answered() -> bool:
    """Return whether a person at a terminal can answer a question."""
    real = sys.stdout if destination._kept is None else destination._real
    return sys.stdin.isatty() and real.isatty()


def add_options(command: Any) -> None:
    """Add the options to a command, or to all commands of a group."""
    inner = getattr(command, "commands", None)
    if inner is None:
        have = {name for each in command.params for name in each.opts}
        command.params += [each for each in _options() if not have.intersection(each.opts)]
    for each in (inner or {}).values():
        add_options(each)


def _options() -> list[Any]:
    """Return the options as parameters of a command, by what Typer makes of a function's."""

    def to_file(path: str | None) -> None:
        destination.choose(path=path)

    def silence(asked: bool) -> None:
        destination.choose(quiet=asked)

    def declared(
        quiet: Annotated[
            bool,
            typer.Option(
                "--quiet",
                "-q",
                help="Print errors only; the exit code has the result.",
                callback=silence,
                expose_value=False,
            ),
        ] = False,
        output: Annotated[
            str | None,
            typer.Option(
                "--output",
                metavar="FILE",
                help="Write to this file what would be printed.",
                callback=to_file,
                expose_value=False,
            ),
        ] = None,
    ) -> None: ...

    app = typer.Typer(add_completion=False)
    app.command()(declared)
    params: list[Any] = typer.main.get_command(app).params
    return [each for each in params if "--help" not in each.opts]
