"""Builds the tree of settings: file, then environment, then flags; the later wins. Checked once, frozen after.

Knows the sections of `tree.py` by their annotations; a new field there needs nothing here unless it has a range. Every
fault is a ConfigError that names the key, where it was said, and the nearest known key. Reads no machine: "auto" stays
"auto" until `resolve.py`.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..core.errors import ConfigError
from .tree import Config

ENV_PREFIX = "HEADRACE_"
ENV_API_KEY = "HEADRACE_API_KEY"
ENV_CONFIG = "HEADRACE_CONFIG"

SECRET_KEYS = frozenset({"router.api_keys"})
"""Never accepted as flags, never printed, never handed on in a command line."""

_PORT = (0, 65535)
_COUNT = (1, 1 << 20)
_SECONDS = (0.001, 86_400.0)

RANGES: Mapping[str, tuple[float, float]] = types.MappingProxyType(
    {
        "model.max_model_len": (0, 1 << 27),
        "cache.memory_bytes": (0, 1 << 50),
        "cache.gpu_memory_utilization": (0.0, 1.0),
        "cache.history_pages": (0, 1 << 31),
        "cache.window_pages": (0, 1 << 31),
        "cache.state_rows": (0, 1 << 24),
        "cache.snapshot_rows": (0, 1 << 24),
        "engine.max_num_seqs": (1, 1 << 16),
        "engine.max_num_batched_tokens": _COUNT,
        "engine.max_queue": _COUNT,
        "engine.output_reserve_tokens": _COUNT,
        "engine.num_threads": (0, 4096),
        # The payload length is a u32 on the wire.
        "transfer.segment_bytes": (4096, 1 << 30),
        "transfer.num_send_buffers": (1, 65536),
        "transfer.num_landing_buffers": (1, 65536),
        "transfer.window": (1, 256),
        "transfer.reads": (1, 256),
        "transfer.peer_share": (0.001, 1.0),
        "transfer.read_deadline_s": _SECONDS,
        "transfer.progress_deadline_s": _SECONDS,
        "transfer.step_deadline_s": _SECONDS,
        "transfer.lease_s": _SECONDS,
        "transfer.beat_s": _SECONDS,
        "transfer.tombstone_s": _SECONDS,
        "transfer.offer_wait_s": _SECONDS,
        "transfer.pull_wait_s": _SECONDS,
        "transfer.queue_budget_s": _SECONDS,
        "worker.engine_port": _PORT,
        "worker.peer_port": _PORT,
        "worker.status_port": _PORT,
        "worker.drain_s": (0.0, 86_400.0),
        "worker.wedged_after_s": _SECONDS,
        "router.port": _PORT,
        "router.grpc_port": _PORT,
        "router.max_body_bytes": (1024, 1 << 31),
        "router.max_queue": _COUNT,
        "router.queue_timeout_s": _SECONDS,
        "router.attempts": (1, 100),
        "router.local_prefill_tokens": (0, 1 << 20),
        "router.fetch_min_tokens": (0, 1 << 27),
        "router.request_timeout_s": (0.001, 604_800.0),
        "router.drain_s": (0.0, 86_400.0),
        "router.default_max_tokens": (0, 1 << 27),
        "router.tokenizer_threads": (1, 256),
        "serve.prefill": (0, 256),
        "serve.decode": (0, 256),
        "serve.ready_timeout_s": _SECONDS,
    }
)

_BYTE_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _fields() -> dict[str, Any]:
    """Every key of the tree with its annotation, in the tree's order: `section.field`, or a field of the root."""
    found: dict[str, Any] = {}
    for name, annotation in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(annotation):
            for inner, inner_annotation in typing.get_type_hints(annotation).items():
                found[f"{name}.{inner}"] = inner_annotation
        else:
            found[name] = annotation
    return found


FIELDS: Mapping[str, Any] = types.MappingProxyType(_fields())


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing when no known word is near."""
    import difflib  # 5 ms that only a mistake has to pay

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f'; did you mean "{close[0]}"?' if close else ""


def load(
    file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
) -> Config:
    """The checked tree.

    Args:
        file: TOML with a table for each section.
        environment: HEADRACE_SECTION__FIELD (HEADRACE_LOG_LEVEL for the root's), HEADRACE_API_KEY. Names without a
            double underscore that are not of the root are left alone: Kubernetes makes HEADRACE_PORT and more for a
            service of our name.
        flags: keys to values; text is parsed by the field's type.
    Raises:
        ConfigError: unknown key, wrong type, out of range, or settings that contradict each other.
    """
    values: dict[str, object] = {}
    if file is not None:
        values.update(_from_file(file))
    if environment is not None:
        values.update(_from_environment(environment))
    for key, value in (flags or {}).items():
        _require_known(key, f"flag {key}")
        if key in SECRET_KEYS:
            raise ConfigError(f"{key} is a secret: set {ENV_API_KEY} or a file, never a flag")
        values[key] = _typed(key, value, f"flag {key}", from_text=isinstance(value, str))
    config = _build(values)
    check(config)
    return config


def replace(config: Config, values: Mapping[str, object]) -> Config:
    """A new tree with some keys changed; types and ranges are checked as in `load`."""
    known = flatten(config)
    for key, value in values.items():
        _require_known(key, key)
        known[key] = _typed(key, value, key, from_text=False)
    changed = _build(known)
    check(changed)
    return changed


def flatten(config: Config) -> dict[str, object]:
    """Every key with its value, in the tree's order."""
    flat: dict[str, object] = {}
    for key in FIELDS:
        section, _, name = key.rpartition(".")
        flat[key] = getattr(getattr(config, section) if section else config, name)
    return flat


def as_flags(config: Config, exclude: Iterable[str] = ()) -> list[str]:
    """The tree as `--set key=value` words that rebuild it: what differs from the defaults, secrets never."""
    defaults = flatten(Config())
    skipped = SECRET_KEYS.union(exclude)
    words: list[str] = []
    for key, value in flatten(config).items():
        if key not in skipped and value != defaults[key]:
            words += ["--set", f"{key}={_text(value)}"]
    return words


def check(config: Config) -> None:
    """Raise ConfigError where settings contradict each other."""
    serve, transfer, router = config.serve, config.transfer, config.router
    if not serve.monolithic and (serve.prefill < 1 or serve.decode < 1):
        raise ConfigError(
            f"serve.prefill is {serve.prefill} and serve.decode is {serve.decode}: both are at least 1 unless "
            "serve.monolithic is true"
        )
    if serve.monolithic and serve.decode < 1:
        raise ConfigError("serve.decode is 0: with serve.monolithic it is the number of workers, at least 1")
    if transfer.beat_s * 3 > transfer.lease_s:
        raise ConfigError(
            f"transfer.lease_s is {transfer.lease_s} and transfer.beat_s is {transfer.beat_s}: a lease must outlast "
            "three beats, or a lost beat ends transfers"
        )
    if transfer.window > transfer.num_send_buffers:
        raise ConfigError(
            f"transfer.window is {transfer.window}, but there are only {transfer.num_send_buffers} "
            "transfer.num_send_buffers"
        )
    if router.grpc_enabled and router.port and (router.host, router.port) == (router.grpc_host, router.grpc_port):
        raise ConfigError(f"router.port and router.grpc_port are both {router.port} on {router.host}")
    for address in router.workers:
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
            raise ConfigError(f'router.workers: "{address}" is not host:port')


def _from_file(file: Path) -> dict[str, object]:
    try:
        with file.open("rb") as stream:
            document = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    values: dict[str, object] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            for inner, inner_value in value.items():
                _require_known(f"{name}.{inner}", str(file))
                values[f"{name}.{inner}"] = _typed(f"{name}.{inner}", inner_value, str(file), from_text=False)
        else:
            _require_known(name, str(file))
            values[name] = _typed(name, value, str(file), from_text=False)
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    roots = {key for key in FIELDS if "." not in key}
    values: dict[str, object] = {}
    for name, text in sorted(environment.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".", 1)
        if "." in key or key in roots:
            _require_known(key, f"environment {name}")
            values[key] = _typed(key, text, f"environment {name}", from_text=True)
    if environment.get(ENV_API_KEY):
        values["router.api_keys"] = _typed(
            "router.api_keys", environment[ENV_API_KEY], f"environment {ENV_API_KEY}", from_text=True
        )
    return values


def _require_known(key: str, source: str) -> None:
    if key not in FIELDS:
        raise ConfigError(f'unknown setting "{key}" ({source}){nearest(key, FIELDS)}')


def _typed(key: str, value: object, source: str, *, from_text: bool) -> object:
    """The value in the field's own type, in range; text is parsed only where it can be nothing else."""
    annotation = FIELDS[key]
    try:
        if from_text and isinstance(value, str):
            value = _parse(key, annotation, value)
        return _in_range(key, _strict(annotation, value))
    except ValueError as error:
        shown = "" if key in SECRET_KEYS else f", not {_quoted(value)}"
        raise ConfigError(f"{key} ({source}): {error}{shown}") from None


def _parse(key: str, annotation: Any, text: str) -> object:
    stripped = text.strip()
    if annotation is bool:
        words = {"true": True, "1": True, "false": False, "0": False}
        if stripped.lower() not in words:
            raise ValueError("expected true or false")
        return words[stripped.lower()]
    if annotation is int:
        for unit, factor in _BYTE_UNITS.items():
            if key.endswith("_bytes") and stripped.endswith(unit):
                return int(stripped.removesuffix(unit)) * factor
        try:
            return int(stripped)
        except ValueError:
            raise ValueError("expected a whole number") from None
    if annotation is float:
        try:
            return float(stripped)
        except ValueError:
            raise ValueError("expected a number") from None
    if typing.get_origin(annotation) is tuple:
        return [part.strip() for part in stripped.split(",") if part.strip()]
    return text


def _strict(annotation: Any, value: object) -> object:
    """No type is bent but int to float and list to tuple; a bool is not a number."""
    if typing.get_origin(annotation) is Literal:
        allowed = typing.get_args(annotation)
        if value not in allowed:
            hint = nearest(value, allowed) if isinstance(value, str) else ""
            raise ValueError(f"expected one of {', '.join(allowed)}{hint}")
        return value
    if typing.get_origin(annotation) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ValueError("expected a list of strings")
        return tuple(value)
    if annotation is float and type(value) is int:
        return float(value)
    if type(value) is not annotation:
        names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        raise ValueError(f"expected {names[annotation]}")
    return value


def _in_range(key: str, value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    if key in RANGES and isinstance(value, int | float):
        low, high = RANGES[key]
        if not low <= value <= high:
            raise ValueError(f"expected {low:g} to {high:g}")
    return value


def _quoted(value: object) -> str:
    return repr(value)[:200]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(value)
    return str(value)


def _build(values: Mapping[str, object]) -> Config:
    sections: dict[str, dict[str, Any]] = {}
    root: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if section:
            sections.setdefault(section, {})[name] = value
        else:
            root[name] = value
    hints = typing.get_type_hints(Config)
    return Config(**{name: hints[name](**fields) for name, fields in sections.items()}, **root)
