"""Prints what pyproject.toml asks for, one requirement a line: `wanted.py [extra ...]`. Standard library only.

Lets the packages be installed, and stay installed, apart from headrace itself, whose editable install then needs no
network.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
wanted = list(project["dependencies"])
for extra in sys.argv[1:]:
    wanted += project["optional-dependencies"][extra]
print("\n".join(wanted))
