"""C kernels are compiled once for what their machine code depends on, and never half."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.kernels import build


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    return tmp_path


def test_a_source_is_compiled_once(sources, monkeypatch):
    """The second process finds the object of the first."""
    (sources / "seven.c").write_text("int seven(void) { return 7; }")
    path = build.build("seven")
    assert path.parent == sources / "cache"
    assert build.load_library.__wrapped__("seven").seven() == 7
    monkeypatch.setattr(build.subprocess, "run", None)
    assert build.build("seven") == path
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_whatever_changes_machine_code_changes_the_object(sources, monkeypatch):
    """Source, header, flags, compiler or processor."""
    (sources / "seven.c").write_text("int seven(void) { return 7; }")
    (sources / "shared.h").write_text("")
    seen = {build.object_path("seven")}
    (sources / "shared.h").write_text("#define EIGHT 8")
    seen.add(build.object_path("seven"))
    (sources / "seven.c").write_text("int seven(void) { return 8; }")
    seen.add(build.object_path("seven"))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    seen.add(build.object_path("seven"))
    monkeypatch.setattr(build, "_machine", lambda: "another processor")
    seen.add(build.object_path("seven"))
    assert len(seen) == 5


def test_a_refused_source_leaves_nothing_behind(sources):
    """The compiler's own words are the message."""
    (sources / "broken.c").write_text("int broken(void) { return nothing; }")
    with pytest.raises(ConfigError, match="nothing"):
        build.build("broken")
    assert list((sources / "cache").iterdir()) == []


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch):
    """Not a stack of file-not-found."""
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="gcc or clang"):
        build.compiler.__wrapped__()
