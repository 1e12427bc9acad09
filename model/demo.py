"""The demo checkpoint: a small DeepSeek-V4 that was trained for it and lies in the package, to try everything at once.

All three layer classes, the real attention geometry, released names and bytes (fp8 and fp4 with e8m0 scales), and a
byte-level tokenizer with V4's special tokens. `demo_weights/README.md` is its card; `tools/train_demo.py` made it.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..core.errors import ConfigError
from .checkpoint import SINGLE_FILE

FILES = ("config.json", "generation_config.json", SINGLE_FILE, "tokenizer.json", "tokenizer_config.json")
"""What serving reads."""


def default_cache() -> Path:
    """Where this user's files live that can be made again."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "headrace"


def ensure_demo(folder: Path | None = None) -> Path:
    """The demo checkpoint's directory; never to be written to.

    Raises:
        ConfigError: the installation lacks one of its files.
    """
    folder = Path(__file__).resolve().parent / "demo_weights" if folder is None else folder
    for name in FILES:
        if not (folder / name).is_file():
            raise ConfigError(f"the demo checkpoint is not whole: {folder / name} is missing; install headrace again")
    return folder
