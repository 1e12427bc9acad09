"""What the router must know of a checkpoint: tokenizer, chat dialect, names, defaults. No weights are read."""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config.tree import ModelSection
from ..core.errors import ConfigError
from .dialect import DIALECTS, V4, Dialect, EffortProfile
from .output_parser import MarkerIds
from .tokenizer import Tokenizer

log = logging.getLogger("headrace.router.model")

_FIRST_OFFICIAL = 731
"""Month and day in a checkpoint's name from which on every effort text had moved up one tier."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One checkpoint as requests see it."""

    names: tuple[str, ...]
    """The first is the default."""
    root: str
    created: int
    tokenizer: Tokenizer
    dialect: Dialect
    profile: EffortProfile
    markers: MarkerIds
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    default_temperature: float
    default_top_p: float


def load_served_model(section: ModelSection, profile: Literal["auto", "official", "preview"] = "auto") -> ServedModel:
    """Read the checkpoint's small files.

    Raises:
        ConfigError: a file is missing or does not fit what this router can serve.
    """
    if not section.path:
        raise ConfigError("model.path is not set")
    folder = Path(section.path)
    config = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    tokenizer = Tokenizer.load(folder)
    dialect = DIALECTS.get(str(config.get("model_type")), V4)
    for name in dialect.markers:
        tokenizer.marker_id(name)
    chosen = profile if profile != "auto" else detect_profile(folder)
    log.info("event=model path=%s dialect=%s effort_profile=%s", folder.name, dialect.name, chosen)
    eos = generation.get("eos_token_id", config.get("eos_token_id", 1))
    return ServedModel(
        names=section.served_names or (folder.resolve().name,),
        root=section.path,
        created=int(time.time()),
        tokenizer=tokenizer,
        dialect=dialect,
        profile=chosen,
        markers=MarkerIds.of(tokenizer),
        vocab_size=int(config.get("vocab_size", tokenizer.vocab_size)),
        max_position=int(config.get("max_position_embeddings", 0)),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (int(eos),),
        default_temperature=float(generation.get("temperature") or 1.0),
        default_top_p=float(generation.get("top_p") or 1.0),
    )


def detect_profile(folder: Path) -> EffortProfile:
    """Which effort texts the checkpoint was trained with; its encoder's source is read, never run."""
    source = folder / "encoding" / "encoding_dsv4.py"
    if source.exists():
        text = source.read_text(encoding="utf-8", errors="replace")
        return "official" if "REASONING_EFFORT_PROMPTS" in text else "preview"
    dates = [int(found) for found in re.findall(r"(?<!\d)(\d{4})(?!\d)", folder.resolve().name)]
    return "official" if any(_FIRST_OFFICIAL <= date <= 1231 for date in dates) else "preview"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model.path: {path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"model.path: {path.name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model.path: {path.name} is no JSON object")
    return value
