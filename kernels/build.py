"""C kernels for the CPU: compiled once for this machine into the user's cache, then loaded through ctypes.

ctypes releases the GIL around each call. The name of an object holds a hash of everything that its machine code depends
on, so a changed source, compiler or processor never meets an old object. Knows files and the compiler, not operations.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..core.errors import ConfigError

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-ffp-contract=fast")
COMPILE_TIMEOUT_S = 300.0


def cache_dir() -> Path:
    """Where objects are kept: $HEADRACE_CACHE, else `headrace` in the user's cache folder."""
    explicit = os.environ.get("HEADRACE_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


@functools.cache
def compiler() -> tuple[str, ...]:
    """The C compiler as a command: $CC, else cc, gcc or clang from PATH.

    Raises:
        ConfigError: there is none.
    """
    for candidate in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return tuple(words)
    raise ConfigError("the CPU kernels need a C compiler: install gcc or clang, or set CC")


@functools.cache
def _machine() -> str:
    """What `-march=native` depends on: compiler version and processor features.

    Raises:
        ConfigError: what is named as the compiler is none.
    """
    command = [*compiler(), "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"no working C compiler: {error}; install gcc or clang, or set CC") from error
    features = platform.machine() + platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        wanted = ("model name", "flags", "Features", "CPU part")
        first = cpuinfo.read_text().split("\n\n")[0]
        features += "".join(line for line in first.splitlines() if line.startswith(wanted))
    return done.stdout + features


def object_path(source_name: str) -> Path:
    """Path of the built object of `csrc/<source_name>.c`."""
    digest = hashlib.sha256("\0".join((*compiler(), *FLAGS, _machine())).encode())
    for path in (SOURCES / f"{source_name}.c", *sorted(SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    return cache_dir() / f"{source_name}-{digest.hexdigest()[:20]}.so"


def build(source_name: str) -> Path:
    """Compile one source unless its object exists. Two processes may build at once: the rename is atomic.

    Raises:
        ConfigError: the compiler refused the source, its output is the message; or the cache can't be written.
    """
    target = object_path(source_name)
    try:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _compile(source_name, target)
    except OSError as error:
        raise ConfigError(
            f"cannot keep compiled kernels in {target.parent}: {error.strerror}; HEADRACE_CACHE names another folder"
        ) from error
    return target


def _compile(source_name: str, target: Path) -> None:
    handle, part = tempfile.mkstemp(prefix=f".{source_name}-", suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        command = [*compiler(), *FLAGS, "-o", part, str(SOURCES / f"{source_name}.c"), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(str(error)) from error
        if done.returncode != 0:
            raise ConfigError(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
        os.replace(part, target)
    finally:
        Path(part).unlink(missing_ok=True)


@functools.cache
def load_library(source_name: str) -> ctypes.CDLL:
    """The loaded object of `csrc/<source_name>.c`, built if need be.

    Raises:
        ConfigError: as `build`; or the kept object is no library, as after a power cut, and a new one is none either.
    """
    path = build(source_name)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        try:
            _compile(source_name, path)
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise ConfigError(f"cannot load compiled kernels: {error}") from error
