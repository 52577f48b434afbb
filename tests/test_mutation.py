"""``make mutate`` knows every module, and what was judged is still there."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUPS = tomllib.loads((ROOT / "tools/mutation/groups.toml").read_text())
JUDGED = tomllib.loads((ROOT / "tools/mutation/judged.toml").read_text())["mutant"]
PARTS = ["offload", "policies", "backends", "transfer", "connectors", "core"]
NOT_MUTATED = {
    "kvoffload/backends/base.py",  # protocols
    "kvoffload/backends/memory.py",  # a part of the tests of all other parts
}


def files(globs):
    return {str(path.relative_to(ROOT)) for glob in globs for path in ROOT.glob(glob)}


def test_every_module_is_in_one_group():
    grouped = [module for group in GROUPS.values() for module in files(group["modules"])]
    assert len(grouped) == len(set(grouped))
    modules = files(f"kvoffload/{part}/**/*.py" for part in PARTS)
    missing = {module for module in modules - set(grouped) if not module.endswith("__init__.py")}
    assert {module for module in missing if not re.search("/(vllm|sglang)/", module)} == NOT_MUTATED


@pytest.mark.parametrize("group", GROUPS)
def test_what_a_group_names_exists(group):
    settings = GROUPS[group]
    modules = {Path(module).name for module in files(settings["modules"])}
    assert set(settings["without"]) <= files(settings["modules"])
    assert set(settings["first"]) <= modules
    for glob in [*settings["tests"], *(glob for own in settings["first"].values() for glob in own)]:
        assert files([glob]), glob


@pytest.mark.parametrize("mutant", JUDGED, ids=lambda mutant: mutant["was"])
def test_what_was_judged_is_still_there_and_has_a_reason(mutant):
    assert mutant["reason"]
    assert mutant["now"] != mutant["was"]
    assert mutant["was"] in " ".join((ROOT / mutant["module"]).read_text().split())
