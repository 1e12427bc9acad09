"""The doors between rooms: imports are read from the source and held against the table.

Doors open one way. A room also has a list of packages from outside, so that torch or NIXL cannot slip into a process
that must start in half a second.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ROOMS: dict[str, set[str]] = {
    "core": set(),
    "config": set(),
    "proto": set(),
    "kernels": set(),
    "model": {"kernels", "config"},
    "kvcache": {"kernels", "config"},
    "engine": {"model", "kvcache", "kernels", "config"},
    "transfer": {"config"},
    "traces": set(),
    "worker": {"engine", "model", "kvcache", "kernels", "transfer", "traces", "proto", "config"},
    "prefill": {"worker", "engine", "kvcache", "transfer", "proto", "config"},
    "decode": {"worker", "engine", "kvcache", "transfer", "proto", "config"},
    "router": {"proto", "config", "traces"},
    "cli": {"config"},
}
"""Which rooms each may import, besides `core`. `cli` may import any, but only inside functions."""

PACKAGES: dict[str, set[str]] = {
    "core": set(),
    "config": set(),
    "proto": {"google", "grpc"},
    "kernels": {"numpy", "torch", "triton"},
    "model": {"numpy", "safetensors", "tokenizers", "torch"},
    "kvcache": {"numpy", "torch"},
    "engine": {"numpy", "torch"},
    "transfer": {"numpy"},
    "traces": {"opentelemetry"},
    "worker": {"google", "grpc", "numpy", "prometheus_client", "torch", "uvicorn", "uvloop"},
    "prefill": {"uvloop"},
    "decode": {"uvloop"},
    "router": {
        "fastapi", "google", "grpc", "grpc_health", "grpc_reflection", "grpc_status", "numpy", "orjson",
        "prometheus_client", "starlette", "tokenizers", "uvicorn", "uvloop",
    },
    "cli": set(),
}  # fmt: skip
"""Which packages from outside each may import at the top of a module."""

EXCEPTIONS: dict[str, set[str]] = {"transfer/nixl_driver.py": {"nixl_cu13"}}
"""Files with a package of their own: NIXL is touched in one module only."""


def sources(room: str) -> Iterator[Path]:
    """The room's modules, without those that protoc makes."""
    for path in sorted((ROOT / room).rglob("*.py")):
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            yield path


def imports(path: Path) -> Iterator[tuple[str, str, bool]]:
    """(kind, name, at the top) of each import: kind `room` or `package`; the top is what runs when imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    inner = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    inner |= {
        id(node)
        for condition in ast.walk(tree)
        if isinstance(condition, ast.If) and "TYPE_CHECKING" in ast.dump(condition.test)
        for statement in condition.body
        for node in ast.walk(statement)
    }
    depth = len(path.relative_to(ROOT).parts) - 1
    for node in ast.walk(tree):
        top = id(node) not in inner
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _absolute(alias.name, top)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield from _absolute(node.module, top)
        elif isinstance(node, ast.ImportFrom) and node.level == depth + 1:
            # `from ..core.ids import X`, or `from .. import core`, from a module of a room.
            for name in [node.module] if node.module else [alias.name for alias in node.names]:
                yield "room", name.split(".")[0], top


def _absolute(name: str, top: bool) -> Iterator[tuple[str, str, bool]]:
    first, *rest = name.split(".")
    if first == "headrace":
        yield "room", rest[0] if rest else "", top
    elif first not in sys.stdlib_module_names:
        yield "package", first, top


def test_every_folder_with_modules_is_in_the_table():
    """A new room needs a line here, and one in pyproject.toml."""
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    folders |= {"proto"}  # never a package of its own: `proto` is also the import name of proto-plus
    assert folders == set(ROOMS) == set(PACKAGES)
    assert not (ROOT / "proto" / "__init__.py").exists()


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_what_its_doors_allow(room: str):
    """At any depth, in any function; `cli` may open any door inside a function."""
    faults = []
    for path in sources(room):
        relative = path.relative_to(ROOT).as_posix()
        for kind, name, top in imports(path):
            if kind == "room":
                allowed = ROOMS[room] | {"core", room, "__version__"}
                fault = name not in allowed and not (room == "cli" and not top and name in ROOMS)
            else:
                allowed = PACKAGES[room] | EXCEPTIONS.get(relative, set())
                fault = name not in allowed
            if fault:
                faults.append(f"{relative} imports {name}")
    assert faults == []


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_each_other_relatively(room: str):
    """Tools that read only the tree then see which room leans on which. Generated modules may say `headrace.proto`."""
    for path in sources(room):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module is not None
                assert not node.module.startswith("headrace") or node.module.startswith("headrace.proto"), path
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("headrace") for alias in node.names), path


def _modules(*rooms: str) -> list[str]:
    found = []
    for room in rooms:
        for path in sources(room):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if path.name != "nixl_driver.py":
                found.append(".".join(["headrace", *(parts[:-1] if parts[-1] == "__init__" else parts)]))
    return found


def test_light_rooms_import_neither_torch_nor_nixl():
    """core, config, proto, router and transfer less its NIXL driver: every module of them, in a fresh process."""
    code = (
        "import importlib, sys\n"
        f"for name in {_modules('core', 'config', 'proto', 'router', 'transfer')!r}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'nixl_cu13', 'nixl', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("module", "limit_s"), [("headrace.router", 0.5), ("headrace.router.main", 1.0)])
def test_router_imports_quickly(module: str, limit_s: float):
    """The room under half a second, its whole process with FastAPI and gRPC under one: the best of three.

    Processor time of a fresh process: on an idle machine that is the time on the wall, on a busy one still the cost.
    """
    code = f"import time; begin_s = time.process_time()\nimport {module}\nprint(time.process_time() - begin_s)"
    times_s = [
        float(subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(times_s) < limit_s


def test_reader_of_imports_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The check would be worth nothing if a form of import escaped it."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "router" / "inner").mkdir(parents=True)
    module = tmp_path / "router" / "a.py"
    module.write_text(
        "import os, torch.nn\nfrom ..kvcache.pool import X\nfrom .. import engine\nfrom . import b\n"
        "from headrace.model import y\n"
        "def f():\n    import nixl_cu13._api\n    from ..decode import legs\n"
    )
    assert sorted(imports(module)) == [
        ("package", "nixl_cu13", False), ("package", "torch", True), ("room", "decode", False),
        ("room", "engine", True), ("room", "kvcache", True), ("room", "model", True),
    ]  # fmt: skip
    nested = tmp_path / "router" / "inner" / "c.py"
    nested.write_text("from ...transfer import z\nfrom ..a import b\n")
    assert list(imports(nested)) == [("room", "transfer", True)]
