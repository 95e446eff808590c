from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TORCH_FREE = (
    "treadle.conf.load",
    "treadle.conf.lock",
    "treadle.graph.family",
    "treadle.graph.fetch",
    "treadle.graph.generation",
    "treadle.graph.gguf",
    "treadle.graph.hub",
    "treadle.graph.hub_download",
    "treadle.graph.machine",
    "treadle.graph.source",
    "treadle.graph.state",
    "treadle.runtime.request",
    "treadle.serve.__main__",
)
TOP = ("conf", "graph", "kernels", "passes", "runtime", "serve")


def folders_with_code() -> set[str]:
    files = [path for top in TOP for path in (ROOT / top).rglob("*.py")]
    return {"treadle." + ".".join(path.parent.relative_to(ROOT).parts) for path in files}


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel of a clean copy of the sources, built without a network."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for top in TOP:
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                copy = source / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    code = f"import setuptools.build_meta as b; b.build_wheel({str(made)!r})"
    built = run(sys.executable, "-P", "-W", "ignore", "-c", code, cwd=source)
    assert built.returncode == 0, built.stderr
    return zipfile.ZipFile(next(made.glob("*.whl")))


def test_the_package_list_equals_the_tree():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders_with_code()


def test_every_package_has_an_init_and_the_root_has_none():
    for name in folders_with_code():
        assert (ROOT / Path(*name.split(".")[1:]) / "__init__.py").is_file(), name
    assert not (ROOT / "__init__.py").exists()


def test_top_level_folders_are_the_layout():
    made = ("build", "dist")
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in made}
    assert {name for name in folders if name[0] != "." and not name.endswith(".egg-info")} == {*TOP, "tests", "docs"}


def test_the_wheel_ships_code_types_and_yaml(wheel):
    names = set(wheel.namelist())
    code = {f"treadle/{p.relative_to(ROOT)}" for top in TOP for p in (ROOT / top).rglob("*.py")}
    yaml = {f"treadle/{p.relative_to(ROOT)}" for p in (ROOT / "conf").rglob("*.yaml")}
    native = {
        f"treadle/{p.relative_to(ROOT)}" for top in TOP for end in ("cpp", "h") for p in (ROOT / top).rglob(f"*.{end}")
    }
    assert code | yaml | native <= names
    assert {f"treadle/{top}/py.typed" for top in TOP} <= names
    assert not [name for name in names if "tests" in name.split("/")[:2]]


def test_the_console_script_is_main(wheel):
    name = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "treadle = treadle.serve.__main__:main" in wheel.read(name).decode()


def test_the_installed_version_is_the_projects():
    assert importlib.metadata.version("treadle") == PROJECT["project"]["version"]


def test_safe_path_keeps_the_root_from_shadowing_other_packages():
    """./kernels, ./serve ... stand in for nobody: with PYTHONSAFEPATH the root is not on the import path."""
    code = "import importlib.util as u; print([n for n in ('conf', 'kernels', 'serve') if u.find_spec(n)])"
    safe = run(sys.executable, "-c", code, cwd=ROOT, PYTHONSAFEPATH="1")
    bare = run(sys.executable, "-c", code, cwd=ROOT, PYTHONSAFEPATH="")
    assert (safe.stdout.strip(), bare.stdout.strip()) == ("[]", "['conf', 'kernels', 'serve']")
    assert "export PYTHONSAFEPATH := 1" in (ROOT / "Makefile").read_text()


def test_this_very_run_is_safe():
    assert os.environ.get("PYTHONSAFEPATH") or sys.flags.safe_path or str(ROOT) not in sys.path


def test_configuration_and_plans_import_no_torch():
    modules = [*sorted(folders_with_code() - {"treadle.kernels.backend"}), *TORCH_FREE]
    code = f"import sys, importlib; [importlib.import_module(m) for m in {modules}]; assert 'torch' not in sys.modules"
    done = run(sys.executable, "-P", "-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_make_lists_its_targets():
    done = run("make", "help", cwd=ROOT)
    targets = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"dev", "demo", "test", "lint", "types", "format", "bench", "test-gpu", "golden", "check"} <= targets
