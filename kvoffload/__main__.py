"""``python -m kvoffload``: the command line."""

from kvoffload.cli.main import main

main()
