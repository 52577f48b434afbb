"""The ``kvoffload`` command. Each command lives in a module of its own, imported when it is used.

Exit codes: 0 done; 1 the command found something wrong (it says what); 2 wrong usage or settings.
"""

import errno
import io
import os
import re
import sys
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any, NoReturn

import kvoffload
from kvoffload.cli.apart import drop_output, run_apart

COMMANDS: dict[str, str] = {
    "demo": "Serve long prompts again from memory and, after kills, from disk and a server.",
    "bench": "Measure, each row beside the limit taken in the same run.",
    "replay": "Replay a trace through eviction policies, beside Belady's bound.",
    "serve": "Serve all engines of this host from one memory and one set of stores.",
    "top": "Show what an engine's tiers do now, or how full a store is.",
    "cache": "Look into the cache of an engine that runs here, or empty it.",
    "config": "Check, show or describe the settings of an engine.",
    "doctor": "Examine a store, or all tiers of settings: verdicts and remedies.",
    "inspect": "Show what a folder, a Redis or a bucket holds.",
    "verify": "Read every chunk of a store and say what is damaged.",
    "gc": "Remove chunks and leftovers from a folder, or a namespace from a Redis or a bucket.",
    "size": "Say how much memory a trace and a model need for what hit rate.",
}
"""Command → one-line help. Its module has ``command``, or ``app`` with several."""


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Of an error without a file's name: standard output is meant, on a full disk."""
_CLOSED_PIPE = 141
"""The exit code of a command whose output nothing reads any more, as a shell has it: 128 + 13."""


def main() -> None:
    """Run the command line; the entry point of the ``kvoffload`` script."""
    if _asked() in ("doctor", "gc") or "--probe" in sys.argv:
        run_apart(_run)
    else:
        _run()


def _run() -> None:
    try:
        import typer
    except ImportError:
        remedy = "pip install '/path/to/kvoffload[cli]'"
        sys.exit(f"kvoffload: the command line needs its extra: {remedy}")

    from kvoffload.errors import ConfigError

    def print_version(asked: bool) -> None:
        if asked:
            print(f"kvoffload {kvoffload.__version__}")
            raise typer.Exit

    def options(
        context: typer.Context,
        version: Annotated[
            bool,
            typer.Option(
                "--version", help="Print the version.", callback=print_version, is_eager=True
            ),
        ] = False,
    ) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    app = typer.Typer(
        name="kvoffload",
        help="KV cache offloading: demo, benchmarks and tools for operators.",
        callback=options,
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    asked = _asked()
    for name, summary in COMMANDS.items():
        if asked is None or asked not in COMMANDS:
            app.command(name, help=summary)(lambda: None)  # listed in --help without its imports
        elif asked == name:
            module = module_of(name)
            if hasattr(module, "app"):
                app.add_typer(module.app, name=name)
            else:
                app.command(name)(module.command)
    _suit_the_terminal()
    if os.environ.get("NO_COLOR"):  # typer's help keeps bold letters, as rich does
        from typer import rich_utils

        rich_utils.COLOR_SYSTEM = None
    whole = typer.main.get_command(app)
    _join_lines(whole)
    try:
        try:
            whole()
        finally:
            sys.stdout.flush()
    except ConfigError as error:
        print(f"kvoffload: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        sys.exit("kvoffload: this command needs torch: pip install torch")
    except SystemExit as ending:
        if not isinstance(ending.__context__, BrokenPipeError):
            raise
        _end_without_reader()
    except BrokenPipeError:
        _end_without_reader()
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        drop_output(sys.stdout.fileno())
        print(f"kvoffload: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _join_lines(command: Any) -> None:
    """Make each paragraph of the help one line, which the terminal then breaks."""
    command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help or "")
    for inner in getattr(command, "commands", {}).values():
        _join_lines(inner)


def module_of(command: str) -> ModuleType:
    """Import the module of a command: it has the command's name, where no other module has it."""
    name = "config_command" if command == "config" else command
    return import_module(f"kvoffload.cli.{name}")


def _asked() -> str | None:
    """Return the command that is run, or whose words a shell wants to complete."""
    typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS")
    words = typed.split() if typed else sys.argv
    return next((word for word in words[1:] if not word.startswith("-")), None)


def _end_without_reader() -> NoReturn:
    """End as other commands before ``head`` do, in which typer and rich would end with 1.

    What is left to print goes nowhere: the interpreter would fail with it again as it ends.
    """
    drop_output(sys.stdout.fileno())
    sys.exit(_CLOSED_PIPE)


def _suit_the_terminal() -> None:
    """Spell out a character that the terminal's encoding lacks."""
    encoding = "ascii" if _is_c_locale() else None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def _is_c_locale() -> bool:
    """Whether the environment asks for the C locale, where Python writes UTF-8 all the same."""
    given = os.environ
    if given.keys() & {"PYTHONUTF8", "PYTHONIOENCODING"}:
        return False
    if not given.get("LC_ALL") and given.get("LC_CTYPE", "C.UTF-8") != "C.UTF-8":
        return False  # Python itself sets LC_CTYPE to C.UTF-8 then
    return (given.get("LC_ALL") or given.get("LANG")) in ("C", "POSIX")
