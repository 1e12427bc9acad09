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


def test_a_cache_that_cannot_be_written_is_named(sources, monkeypatch):
    """With the variable that helps; not a stack of file errors."""
    (sources / "seven.c").write_text("int seven(void) { return 7; }")
    (sources / "file").write_text("")
    for folder in ("file", "file/below", "/proc/nothing"):
        monkeypatch.setenv("HEADRACE_CACHE", str(sources / folder))
        with pytest.raises(ConfigError, match="HEADRACE_CACHE"):
            build.build("seven")


def test_a_kept_object_that_is_no_library_is_built_anew(sources):
    """A power cut may leave a name without its bytes."""
    (sources / "seven.c").write_text("int seven(void) { return 7; }")
    build.build("seven").write_bytes(b"")
    assert build.load_library.__wrapped__("seven").seven() == 7


@pytest.mark.parametrize("command", ["false", "/"])
def test_a_compiler_that_does_not_work_is_told_as_such(command, monkeypatch):
    """CC may name anything."""
    monkeypatch.setattr(build, "compiler", lambda: (command,))
    with pytest.raises(ConfigError, match="set CC"):
        build._machine.__wrapped__()


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch):
    """Not a stack of file-not-found."""
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="gcc or clang"):
        build.compiler.__wrapped__()
