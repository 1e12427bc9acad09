"""`headrace layout`: what the cache of a model costs, as a table or as JSON. Needs neither torch nor weights."""

from __future__ import annotations

import argparse
import json
import sys
from difflib import get_close_matches
from pathlib import Path

from ..core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("model", help="a checkpoint directory, a config.json, deepseek-v4-flash or deepseek-v4-pro")
    parser.add_argument(
        "--tokens", type=_positive_int, default=1 << 20, help="length of one sequence (default: 1048576)"
    )
    parser.add_argument("--gib", type=_positive_float, help="say how many tokens of history fit into so many GiB")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table; raises ConfigError for a model that is not there or has no schedule."""
    from ..kvcache.layout import CacheShape
    from ..kvcache.presets import PRESETS
    from ..kvcache.table import cache_table, format_table

    name: str = args.model
    shape = PRESETS.get(name)
    if shape is None:
        from ..model.config import ModelConfig

        path = Path(name)
        if not path.exists():
            near = get_close_matches(name, PRESETS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; presets are {', '.join(PRESETS)}"
            raise ConfigError(f"{name}: no such directory or file{hint}")
        model = ModelConfig.load(path)
        shape = CacheShape(model.ratios, model.num_mtp_layers)
    table = cache_table(shape, args.tokens, args.gib)
    sys.stdout.write(
        (json.dumps({"model": name, **table}, indent=2) if args.json else format_table(name, table)) + "\n"
    )
    return 0


def _positive_int(text: str) -> int:
    value = int(text)
    if not 0 < value <= 1 << 26:
        raise argparse.ArgumentTypeError("from 1 to 67108864")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < 1 << 20:
        raise argparse.ArgumentTypeError("more than 0, less than 1048576")
    return value
