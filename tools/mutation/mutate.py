"""Mutation testing, sampled: which wrong lines of the product would no test notice?

``make mutate`` draws mutants by a seed: ``ARGS="--group offload --seed 7 --sample 40"``. cosmic-ray
makes each mutant in a temporary copy of the checkout, and runs there the tests that ``groups.toml``
names for its module. A survivor needs a test, or an entry in ``judged.toml`` that says why the
mutant does no harm. The exit status is 1 when the tests kill fewer than 90 % of the rest.
"""

import argparse
import contextlib
import difflib
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome
from parso.python.tree import Keyword

NEEDED_PERCENT = 90
LEAST_LIMIT_S = 60.0
"""A mutant may take three times the time of the original, and at least this."""

# The subtle mutants: `a < b` becomes `a <= b` or `a >= b`, not `a is b`, which any test kills.
SUBTLE = re.compile(
    r"core/(AddNot|NumberReplacer|ZeroIterationForLoop|Replace\w+With\w+"
    r"|ReplaceComparisonOperator_"
    r"(Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is|Lt_LtE|Lt_GtE|LtE_Lt|LtE_Gt|Gt_GtE|Gt_LtE|GtE_Gt|GtE_Lt)"
    r"|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_FloorDiv|FloorDiv_Mul|Div_Mul|Mod_FloorDiv"
    r"|BitAnd_BitOr|BitOr_BitAnd|LShift_RShift|RShift_LShift)|ReplaceUnaryOperator_Delete_\w+)"
)


class RemoveStatement(Operator):
    """Replace one statement by ``pass``: a call, a return, a raise, an assignment to a field."""

    def mutation_positions(self, node):
        """Yield the place of a statement."""
        if node.type == "simple_stmt" and self._can_go(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node, index):
        """Put ``pass`` there, after the same comments."""
        gone = node.children[0]
        node.children[0] = Keyword("pass", gone.start_pos, gone.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls):
        """Return none: only cosmic-ray's own tests ask for examples."""
        return ()

    @staticmethod
    def _can_go(statement) -> bool:
        if statement.type == "expr_stmt":
            # Without `x = 1` a name is missing, and any test that runs the line fails.
            target, sign = statement.children[0].get_code(), statement.children[1]
            return sign.type == "operator" and (sign.value != "=" or "." in target or "[" in target)
        if statement.type == "keyword":
            return statement.value in {"return", "raise", "continue", "break"}
        return statement.type in {"atom_expr", "return_stmt", "raise_stmt", "del_stmt"}


@dataclass
class Mutant:
    """One changed statement of one module, and what the tests made of it."""

    group: str
    module: str
    operator: str
    line: int
    code: str
    diff: list[str]
    outcome: str = "not run"

    @property
    def identity(self) -> tuple[str, str, str]:
        """What an entry of ``judged.toml`` says: module, lines before, lines after."""
        # The line above belongs to both, because a module may say `return` more than once.
        body = self.diff[3:]
        above = [line for line, next_one in pairwise(body) if line[0] == " " != next_one[0]][:1]
        sides = (above + [line for line in body if line[0] == sign] for sign in "-+")
        was, now = (" ".join(" ".join(line[1:] for line in side).split()) for side in sides)
        return self.module, was, now


def is_declaration(node) -> bool:
    """Whether a node is a part of a type annotation or of a decorator: neither computes."""
    while (above := node.parent) is not None:
        place = {"annassign": 1, "tfpdef": 2}.get(above.type)
        if node is (above.children[place] if place else getattr(above, "annotation", None)):
            return True
        if above.type == "decorator":
            return True
        node = above
    return False


def mutants_of(group: str, modules: list[str], chance: random.Random) -> Iterator[Mutant]:
    """Draw mutants of a group; each place in its modules is as likely as any other."""
    operators = {name: get_operator(name)() for name in operator_names() if SUBTLE.fullmatch(name)}
    operators["RemoveStatement"] = RemoveStatement()
    places: dict[tuple[str, tuple[int, int]], list[tuple[str, int]]] = {}
    for module in modules:
        nodes = list(ast_nodes(get_ast(Path(module).read_text())))
        for name, operator in operators.items():
            found = [(node, at) for node in nodes for at, _ in operator.mutation_positions(node)]
            for occurrence, (node, at) in enumerate(found):
                if not is_declaration(node) and "TYPE_CHECKING" not in node.get_code():
                    places.setdefault((module, at), []).append((name, occurrence))
    order = sorted(places)
    chance.shuffle(order)
    for module, at in order:
        name, occurrence = chance.choice(places[module, at])
        source = Path(module).read_text()
        code = mutate_code(source, operators[name], occurrence)
        with contextlib.suppress(SyntaxError):
            compile(code, module, "exec")
            sides = source.splitlines(), code.splitlines()
            diff = list(difflib.unified_diff(*sides, module, module, n=2, lineterm=""))
            yield Mutant(group, module, name.rpartition("/")[2], at[0], code, diff)


def copy_tree(source: Path, target: Path) -> None:
    """Copy the checkout without environments, caches and history."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*", "__pycache__"))


def run_in_a_copy(tests: list[str], limit_s: float, mutant: Mutant | None) -> str:
    """Return "" if tests pass in a copy of their own, "timeout", or what pytest wrote."""
    with tempfile.TemporaryDirectory(prefix="mut-") as folder:
        copy = Path(folder) / "kv"
        copy_tree(Path(), copy)
        if mutant:
            (copy / mutant.module).write_text(mutant.code)
        pytest = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider"]
        # Temporary files of a test that was killed are removed with the copy.
        enter = f"cd {copy} && TMPDIR={folder} PYTHONPATH={copy} exec {shlex.join(pytest + tests)}"
        outcome, said = run_tests(shlex.join(["sh", "-c", enter]), limit_s)
    if outcome is TestOutcome.SURVIVED:
        return ""
    return "timeout" if said == "timeout" or "Timeout (>" in said else said or "pytest died"


def judge(mutant: Mutant, group: dict, limit_s: float) -> None:
    """Find out whether the tests kill a mutant, and print it."""
    begun = time.monotonic()
    said = run_in_a_copy(chosen_tests(group, mutant.module), limit_s, mutant)
    mutant.outcome = {"": "survived", "timeout": "timeout"}.get(said, "killed")
    failed = re.search(r"^(?:FAILED|ERROR) \S+", said, re.MULTILINE)
    killer = failed[0] if failed else said.strip()[-200:]
    where = f"{mutant.module}:{mutant.line} {mutant.operator}"
    print(f"{mutant.outcome:9}{time.monotonic() - begun:5.0f} s  {where}  {killer}", flush=True)


def limit_of(name: str, group: dict) -> float:
    """Return how long a mutant of a group may take; ends the run if its tests fail without one."""
    begun = time.monotonic()
    if said := run_in_a_copy(chosen_tests(group), 1800.0, None):
        sys.exit(f"{said}\nThe tests of {name} fail without a mutant, so they would prove nothing.")
    taken = time.monotonic() - begun
    print(f"The tests of {name} take {taken:.0f} s without a mutant.", flush=True)
    return max(LEAST_LIMIT_S, 3 * taken)


def paths(globs: list[str]) -> list[str]:
    """Return the files that match, each once, in the order of the globs."""
    return list(dict.fromkeys(str(path) for glob in globs for path in sorted(Path().glob(glob))))


def modules_of(group: dict) -> list[str]:
    """Return the modules of a group that are mutated."""
    return [path for path in paths(group["modules"]) if path not in group["without"]]


def chosen_tests(group: dict, module: str = "") -> list[str]:
    """Return the tests of a group, those that name the module first: they kill sooner."""
    found = paths(group["first"].get(Path(module).name, []) + group["tests"])
    return [path for path in found if Path(path).name.startswith("test_")]


def report(sample: list[Mutant], names: list[str]) -> float:
    """Print the survivors and the table; return the percentage killed."""
    for mutant in sample:
        if mutant.outcome == "survived":
            _, was, now = mutant.identity
            print("", f"SURVIVED {mutant.operator}", *mutant.diff, sep="\n")
            print(f"[[mutant]]\nmodule = {mutant.module!r}\nwas = {was!r}\nnow = {now!r}")
    print("\n| group | mutants | killed | killed by timeout | survived | judged | killed % |")
    print("|---|---|---|---|---|---|---|")
    for name in [*names, "all"]:
        count = Counter(mutant.outcome for mutant in sample if name in (mutant.group, "all"))
        told, counted = count["killed"] + count["timeout"], count.total() - count["judged"]
        percent = 100 * told / counted if counted else 100.0
        row = [str(count[outcome]) for outcome in ("killed", "timeout", "survived", "judged")]
        print(f"| {name} | {count.total()} | {' | '.join(row)} | {percent:.0f} |")
    return percent


def main() -> int:
    """Draw the sample, run it, report."""
    groups = tomllib.loads(Path("tools/mutation/groups.toml").read_text())
    entries = tomllib.loads(Path("tools/mutation/judged.toml").read_text())["mutant"]
    judged = {(entry["module"], entry["was"], entry["now"]) for entry in entries}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--sample", type=int, default=20, help="mutants a group")
    parser.add_argument("--group", action="append", choices=list(groups), help="may be repeated")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    options = parser.parse_args()
    names = options.group or [name for name in groups if groups[name]["by_default"]]
    sample, running = [], []
    with ThreadPoolExecutor(options.jobs) as pool:
        for name in names:
            group, chance = groups[name], random.Random(f"{options.seed}:{name}")
            mutants = list(islice(mutants_of(name, modules_of(group), chance), options.sample))
            limit_s = limit_of(name, group)
            for mutant in mutants:
                if mutant.identity in judged:
                    mutant.outcome = "judged"
                else:
                    running.append(pool.submit(judge, mutant, group, limit_s))
            sample += mutants
        for one in running:
            one.result()
    return 0 if report(sample, names) >= NEEDED_PERCENT else 1


if __name__ == "__main__":
    # All copies are made from this one, because the checkout may be edited meanwhile.
    with tempfile.TemporaryDirectory(prefix="mut-") as snapshot:
        copy_tree(Path(__file__).parents[2], Path(snapshot) / "kv")
        os.chdir(Path(snapshot) / "kv")
        sys.exit(main())
