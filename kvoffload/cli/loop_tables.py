"""The tables of ``kvoffload replay --closed-loop``."""

from collections.abc import Sequence
from typing import Any

from kvoffload.cli.output import console, print_numbers, say
from kvoffload.replay.closed_loop import HELPED, ORACLE, Loop, of_oracle, of_policy
from kvoffload.replay.trace import Trace

_NAMES = {"": "", "waiting": ", waiting kept", "told": ", returns told", "both": ", both"}


def run_loops(trace: Trace, loops: Sequence[Loop], policies: Sequence[str]) -> list[dict[str, Any]]:
    """Run each loop with each policy, alone and helped, and with a store that knows all.

    Raises:
        ConfigError: the trace has no times, or there is no such policy.
    """
    rows = []
    for loop in loops:
        runs = [(name, helped) for name in policies for helped in HELPED]
        found = [(*run, of_policy(trace, loop, *run)) for run in runs]
        for policy, helped, served in [*found, (ORACLE, "", of_oracle(trace, loop))]:
            facts = {"policy": policy, "helped": helped, "capacity_blocks": loop.slots}
            rows.append({**facts, "sessions": loop.sessions, **served.plain()})
    return rows


def show_loops(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table for each number of sessions and each size."""
    for sessions, slots in dict.fromkeys((row["sessions"], row["capacity_blocks"]) for row in rows):
        lines = [
            (
                row["policy"] + _NAMES[row["helped"]],
                [
                    f"{100 * row['prefix_hit_rate']:.2f}",
                    f"{row['requests_per_hour']:,.0f}",
                    f"{row['mean_time_to_first_token_s']:.2f}",
                ],
            )
            for row in rows
            if (row["sessions"], row["capacity_blocks"]) == (sessions, slots)
        ]
        title = f"{sessions:,} sessions, {slots:,} blocks"
        columns = ["hits, %", "served an hour", "first token, s"]
        print_numbers(console(), title, "policy", columns, lines)
    say("oracle knows what each session asks for next, and when")
