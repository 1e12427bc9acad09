"""Makes the protobuf modules beside their .proto files before the package is collected.

Everything else about the distribution stands in pyproject.toml.
"""

from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = Path(__file__).resolve().parent / ".src" / "headrace"


def generate_stubs() -> None:
    """Run protoc over proto/**; output lands beside the sources, imports say `headrace.proto...`."""
    import grpc_tools
    from grpc_tools import protoc

    standard = Path(grpc_tools.__file__).parent / "_proto"
    out = PACKAGE.parent
    sources = sorted(
        "headrace/proto/" + path.relative_to(PACKAGE / "proto").as_posix()
        for folder in ("v1", "internal/v1")
        for path in (PACKAGE / "proto" / folder).glob("*.proto")
    )
    status = protoc.main(
        [
            "protoc",
            f"-Iheadrace/proto={PACKAGE}/proto",
            f"-I{standard}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--pyi_out={out}",
            *sources,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}")


class BuildPy(build_py):
    """build_py that generates first, and keeps setup.py itself out of the wheel."""

    def run(self) -> None:
        generate_stubs()
        super().run()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules: list[Any] = super().find_package_modules(package, package_dir)
        return [module for module in modules if (module[0], module[1]) != ("headrace", "setup")]


setup(cmdclass={"build_py": BuildPy})
