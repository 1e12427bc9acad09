"""The distribution: the wheel holds every room and nothing else, installs into an empty folder, and runs from there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).resolve().parents[1]
NEVER_INSTALLED = ("tests", "docs", "benchmarks", "deploy", "tools", "requirements")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git knows, so that neither stubs nor build folders of this tree take part."""
    copy = tmp_path_factory.mktemp("source") / "headrace"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, copy / name
        if source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.readlink())
        elif source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps",
         "--no-build-isolation", "-w", str(out), str(copy)],
        check=True,
    )  # fmt: skip
    (built,) = out.glob("headrace-*.whl")
    return built


def test_wheel_holds_every_room(wheel: Path):
    """The folders in the wheel are those of the tree; a new room needs its line in pyproject.toml."""
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name.split("/")[1] for name in names if name.startswith("headrace/") and name.count("/") > 1}
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"proto"}
    assert packed == rooms


def test_wheel_holds_every_module_the_stubs_and_the_sources_of_kernels(wheel: Path):
    """Nothing that an installed headrace reads stays behind."""
    names = set(zipfile.ZipFile(wheel).namelist())
    rooms = [path.parent for path in ROOT.glob("*/__init__.py")]
    for room in rooms:
        for path in room.rglob("*"):
            if path.suffix in (".py", ".c", ".h", ".cu", ".cuh"):
                assert f"headrace/{path.relative_to(ROOT).as_posix()}" in names
    for proto in (ROOT / "proto").rglob("*.proto"):
        stem = f"headrace/{proto.relative_to(ROOT).with_suffix('').as_posix()}"
        assert {f"{stem}.proto", f"{stem}_pb2.py", f"{stem}_pb2.pyi", f"{stem}_pb2_grpc.py"} <= names
    assert "headrace/py.typed" in names


def test_wheel_holds_nothing_else(wheel: Path):
    """No tests, no set-up, no caches, no second copy through the link."""
    for name in zipfile.ZipFile(wheel).namelist():
        assert not name.startswith(tuple(f"headrace/{folder}/" for folder in NEVER_INSTALLED)), name
        assert name.startswith(("headrace/", "headrace-")), name
        assert "/.src/" not in name
        assert name != "headrace/setup.py"
        assert not name.endswith((".pyc", ".so"))


def test_installed_wheel_runs_from_another_folder(wheel: Path, tmp_path: Path):
    """Installed into an empty folder, the command works and imports itself from there, not from the tree."""
    target = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-index",
         "--target", str(target), str(wheel)],
        check=True,
    )  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(target)}
    code = "import headrace, headrace.config.load, headrace.proto.internal.v1.engine_pb2, sys;print(headrace.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).is_relative_to(target)
    script = subprocess.run(
        [target / "bin" / "headrace", "version"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert script.stdout.startswith(f"headrace {headrace.__version__}\n")


def test_console_script_is_installed_here():
    """The editable install has the command beside its Python."""
    script = Path(sys.executable).parent / "headrace"
    done = subprocess.run([script, "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"headrace {headrace.__version__}\n")


def test_root_is_the_package():
    """One relative link gives the tree its name; see docs/adr/0001."""
    link = ROOT / ".src" / "headrace"
    assert link.is_symlink()
    assert link.readlink() == Path("..")
    assert Path(headrace.__file__).resolve() == ROOT / "__init__.py"
