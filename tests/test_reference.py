"""The reference pages in the repository are what the script makes of the code."""

import importlib.util
import re
from pathlib import Path

import msgspec
import pytest

import kvoffload
from kvoffload.cli.main import COMMANDS
from kvoffload.config import KNOWN_HINTS
from kvoffload.connectors.vllm.start import VllmConfigSettings

pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")

ROOT = Path(__file__).parents[1]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference, api_reference = script("reference"), script("api_reference")
COUNTED = re.compile(r"""(?:count(?:er)?s?[\[(]f?|(?:events|failures)\[f?)"(\w*)[^"]*"[\])]""")
"""A counter's name where the code counts it, up to its first placeholder."""


def page(name):
    return (ROOT / "docs" / "reference" / name).read_text()


def test_the_pages_in_the_repository_are_what_the_script_prints():
    for path, text in reference.pages().items():
        assert path.read_text() == text, f"{path.name}: run python tools/reference.py"


def test_the_page_of_python_names_is_what_their_docstrings_say():
    text = api_reference.PAGE.read_text()
    assert text == api_reference.page(), "run python tools/api_reference.py"
    for name in kvoffload.__all__:
        assert name.startswith("_") or f"\n## {name}\n" in text
    engine = "    request: OffloadRequest,\n    block_ids: Sequence[Sequence[int]],\n"
    assert f"```text\nafter_forward(\n{engine}" in text
    assert "\n    load_timeout_s: float = " in text
    assert "* `page_size_bytes`: Bytes that layer uses" in text
    assert "Annotated[" not in text
    calls = re.findall("```text\n(.*?)```", text, re.DOTALL)
    assert max(len(line) for call in calls for line in call.splitlines()) <= 110


def test_a_page_that_differs_is_found(monkeypatch, capsys):
    wrong = {ROOT / "docs" / "reference" / "settings.md": "something else"}
    monkeypatch.setattr(reference, "pages", lambda: wrong)
    monkeypatch.setattr("sys.argv", ["reference.py", "--check"])
    assert reference.main() == 1
    assert "docs/reference/settings.md differs" in capsys.readouterr().out


def test_each_setting_hint_and_command_has_a_text():
    options = reference._backend_options()
    assert {"disk", "memory", "redis"} <= set(options)
    for struct in (VllmConfigSettings, *options.values()):
        texts = reference.field_texts(struct) | reference.texts()["settings"]
        for field in msgspec.structs.fields(struct):
            assert texts.get(field.name), f"{struct.__name__}.{field.name} has no text"
    assert set(reference.texts()["hints"]) == set(KNOWN_HINTS)
    for command in COMMANDS:
        assert f"## kvoffload {command}\n" in page("command-line.md")


@pytest.mark.parametrize(
    "part",
    [
        "offload", "backends/redis", "backends/object", "transfer", "connectors/vllm",
        "connectors/sglang",
    ],
)  # fmt: skip
def test_each_counter_that_the_code_names_is_on_the_page(part):
    """Names with a variable part need a row that begins alike."""
    text = page("counters.md")
    for path in (ROOT / "kvoffload" / part).glob("*.py"):
        for name in COUNTED.findall(path.read_text()):
            assert f"`{name}" in text, f"{path.name} counts {name!r}"
