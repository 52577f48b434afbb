"""The package as a whole: light to import, layered, and without code in data."""

import ast
import contextlib
import inspect
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement  # pytest depends on it

import kvoffload

PACKAGE = Path(kvoffload.__file__).parent
ROOT = PACKAGE.parent


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


def test_importing_loads_no_torch_and_no_store():
    heavy = ("torch", "numpy", "redis", "asyncio", "typer", "vllm")
    loaded = run(f"import sys, kvoffload; print(*[m for m in {heavy} if m in sys.modules])")
    assert loaded == []


def test_the_io_process_and_the_server_of_a_host_load_no_torch_and_no_numpy():
    parts = "kvoffload.io.process, kvoffload.cli.serve, kvoffload.backends.disk.backend"
    assert run(f"import sys, {parts}; print(*{{'torch', 'numpy'}} & {{*sys.modules}})") == []


def test_each_requirement_is_bounded_and_what_is_installed_is_within_its_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["optional-dependencies"].values()
    texts = chain(project["dependencies"], *groups)
    wanted = [Requirement(text) for text in texts]
    checked = 0
    for each in wanted:
        if each.name == "kvoffload":
            continue
        assert any(part.operator in ("<", "==") for part in each.specifier), each
        with contextlib.suppress(PackageNotFoundError):
            assert each.specifier.contains(version(each.name)), each
            checked += 1
    assert checked > len(project["dependencies"])


def test_the_package_imports_each_of_its_requirements():
    """What only tests and benchmarks import belongs to the extra dev."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    imported = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module)
            imported |= {name.partition(".")[0] for name in names}
    assert {Requirement(each).name for each in project["dependencies"]} - imported == set()


LOCKS = [("docs/requirements.txt", "zensical"), ("requirements-dev.txt", "pytest")]


@pytest.mark.parametrize(("lock", "name"), LOCKS)
def test_each_file_that_is_installed_for_the_site_and_for_tests_is_known_by_its_hash(lock, name):
    recipe = (ROOT / "Makefile").read_text()
    assert f"/$(PIP_INSTALL) --require-hashes -r {lock}\n" in recipe
    text = (ROOT / lock).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert any(line.startswith(f"{name}==") for line in lines)
    for line in lines:
        requirement, *hashes = line.split(" --hash=")
        assert [each.operator for each in Requirement(requirement).specifier] == ["=="], line
        assert hashes
        assert all(each.strip().startswith("sha256:") for each in hashes)


def test_the_locked_versions_are_what_the_project_requires_but_torch():
    text = (ROOT / "requirements-dev.txt").read_text()
    locked = re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE)
    names = {name for name, _ in locked}
    assert not {name for name in names if re.match("torch|cuda-|nvidia-|triton", name)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name, each in project["optional-dependencies"].items() if name != "mutate"]
    for each in map(Requirement, chain(project["dependencies"], *extras)):
        if each.name not in ("torch", "kvoffload"):
            versions = [version for name, version in locked if name == each.name]
            assert versions, each
            assert all(map(each.specifier.contains, versions)), each


def test_no_text_installs_kvoffload_by_its_bare_name():
    """An index may have another project under it: texts name the path of a checkout."""
    bare = re.compile(r"""pip install(?: -\S+)* ['"]?kvoffload\b""")
    assert bare.search("pip install -q 'kvoffload[cli]'")
    files = (*PACKAGE.rglob("*.py"), *ROOT.rglob("docs/**/*.md"), *ROOT.rglob("examples/**/*.*"))
    texts = [path for path in (*files, ROOT / "README.md") if path.is_file()]
    assert len(texts) > 200
    found = [str(path) for path in texts if bare.search(path.read_text(errors="replace"))]
    assert found == []


def test_texts_name_extras_that_there_are_and_none_has_the_name_of_a_requirement():
    """Redis needs no extra: the client that the tier uses is its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert not {Requirement(each).name for each in project["dependencies"]} & set(extras)
    folders = (ROOT / "docs").rglob("*.md"), (ROOT / "examples").rglob("*")
    files = (*PACKAGE.rglob("*.py"), *chain(*folders))
    texts = [path.read_text(errors="replace") for path in files if path.is_file()]
    texts += [(ROOT / name).read_text() for name in ("README.md", "Makefile")]
    named = {
        extra
        for text in texts
        for names in re.findall(r"(?:kvoffload|'\.)\[([a-z0-9,]+)\]", text)
        for extra in names.split(",")
    }
    assert "cli" in named
    assert named <= set(extras)


PUBLIC = {
    "__version__", "open_backend", "OffloadConfig", "BackendConfig", "ByteSize", "parse_config",
    "ConfigError", "KVOffloadError", "UsageError",
    "LocalConnector", "OffloadRequest", "LoadOutcome", "canonicalize_kv_caches",
    "CanonicalKVCaches", "CanonicalKVCacheTensor", "CanonicalKVCacheRef", "OffloadKey",
    "make_offload_key", "namespace",
    "Backend", "ThreadedBackend", "AsyncBackend", "InlineBackend", "LocalIndex", "Observable",
    "ReadsEach", "ReadResult", "Removal", "Spares", "Usage", "Policy",
    "OffloadingManager", "OffloadingSpec", "OffloadingEvent", "ChunksStored", "ChunksRemoved",
    "Exporter", "folder_digest",
}  # fmt: skip


def test_what_is_public_is_there_and_documented():
    assert set(kvoffload.__all__) == PUBLIC
    for name in PUBLIC - {"__version__", "OffloadKey"}:
        assert inspect.getdoc(getattr(kvoffload, name)), name
    assert kvoffload.OffloadKey(b"key") == b"key"
    assert set(dir(kvoffload)) >= PUBLIC
    with pytest.raises(AttributeError, match="nothing_like_it"):
        kvoffload.nothing_like_it


SAME_NAME = {
    "base.py", "backend.py", "connector.py", "options.py", "doctor.py", "admin.py", "manager.py",
}  # fmt: skip
"""Names that several folders may have; those of the two managers are older than the rule."""


def test_files_are_short_and_have_names_of_their_own():
    modules = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    long = [str(path) for path in modules if len(path.read_text().splitlines()) > 600]
    assert long == []
    names = Counter(path.name for path in modules)
    assert {name for name, count in names.items() if count > 1} <= SAME_NAME


def test_stored_bytes_are_never_code():
    forbidden = {"pickle", "dill", "marshal", "shelve", "cloudpickle"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call):
                names = {ast.unparse(node.func)} & {"eval", "exec", "torch.load"}
            else:
                continue
            assert not names & (forbidden | {"eval", "exec", "torch.load"}), (path, node.lineno)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source archive and the wheel, as `python -m build` makes them, without a network."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel"]
    subprocess.run([*build, "-d", str(out)], cwd=ROOT, check=True, capture_output=True)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def modules(*folders):
    return {str(p.relative_to(ROOT)) for name in folders for p in (ROOT / name).rglob("*.py")}


def test_the_source_archive_lacks_no_module_and_no_page(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    pages = {page.name for page in ROOT.glob("*.md")}
    wanted = modules("kvoffload", "examples", "benchmarks", "tests") | pages | {".dockerignore"}
    assert wanted - names == set()
    assert {"backends", "connectors"} & names == set()  # links of the checkout


def test_the_wheel_is_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert modules("kvoffload") - names == set()
    assert {name.partition("/")[0] for name in names} == {"kvoffload"}
    assert not any("benchmarks" in name or "tests" in name for name in names)


@pytest.fixture
def in_wheel(built, tmp_path):
    """Unpack the wheel, and return what runs a program with it alone."""
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return lambda *words: subprocess.run(
        [sys.executable, "-c", *words],
        cwd=tmp_path, capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip


def test_a_bench_from_a_wheel_says_that_it_needs_the_checkout(in_wheel):
    shown = in_wheel("from kvoffload.cli.main import main; main()", "bench", "copy")
    assert shown.returncode == 2, shown.stderr
    assert "needs the source checkout" in shown.stderr


def test_the_demo_is_part_of_an_unpacked_wheel(in_wheel, tmp_path):
    shown = in_wheel("import kvoffload.demo.showcase as demo; print(demo.__file__)")
    assert shown.returncode == 0, shown.stderr
    assert Path(shown.stdout.strip()).is_relative_to(tmp_path)
