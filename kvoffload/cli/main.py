"""The ``kvoffload`` command. Each command lives in a module of its own, imported when it is used.

Exit codes: 0 done; 1 the command found something wrong (it says what); 2 wrong usage or settings.
"""

import sys
from importlib import import_module

COMMANDS: dict[str, str] = {
    "demo": "Serve long prompts again from host memory and, after a kill, from disk.",
    "bench": "Measure, each row beside the limit taken in the same run.",
    "replay": "Replay a trace through eviction policies, beside Belady's bound.",
    "doctor": "Examine a Redis (or a folder): verdicts and remedies.",
    "inspect": "Show what a folder or a Redis holds.",
    "verify": "Read every chunk of a folder and say what is damaged.",
    "gc": "Remove chunks and leftovers from a folder, or a namespace from a Redis.",
    "size": "Say how much memory a trace and a model need for what hit rate.",
}
"""Command → one-line help. The module ``kvoffload.cli.<command>`` has ``app`` or ``command``."""


def main() -> None:
    """Run the command line; the entry point of the ``kvoffload`` script."""
    try:
        import typer
    except ImportError:
        sys.exit("kvoffload: the command line needs its extra: pip install 'kvoffload[cli]'")

    from kvoffload.errors import ConfigError

    app = typer.Typer(
        name="kvoffload",
        help="KV cache offloading: demo, benchmarks and tools for operators.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    asked = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if asked is None or asked not in COMMANDS:
            app.command(name, help=summary)(lambda: None)  # listed in --help without its imports
        elif asked == name:
            module = import_module(f"kvoffload.cli.{name}")
            if hasattr(module, "app"):
                app.add_typer(module.app, name=name)
            else:
                app.command(name)(module.command)
    if len(COMMANDS) == 1 or asked in COMMANDS:
        app.callback()(lambda: None)  # keep the command's name even when it is the only one
    try:
        app()
    except ConfigError as error:
        print(f"kvoffload: {error}", file=sys.stderr)
        sys.exit(2)
