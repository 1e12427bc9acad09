"""Strict reading of JSON fields: the first problem is named by its path, with what was expected.

`"5"` is no integer, `true` is no number, NaN is nothing, null equals absent. A value is echoed to 200 characters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import RequestError

MAX_ECHO = 200
INT64 = 1 << 63


def echo(value: object) -> str:
    """A value as it may be shown back to the client."""
    if isinstance(value, str):
        text = value[: MAX_ECHO + 1]
    elif isinstance(value, (list, tuple, dict)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    else:
        text = str(value)
    return text if len(text) <= MAX_ECHO else text[: MAX_ECHO - 1] + "…"


def wrong_type(param: str, expected: str, value: object) -> RequestError:
    kind = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "object"}
    got = "null" if value is None else kind.get(type(value), "value")
    return RequestError(f"'{param}' must be {expected}, got {got}: {echo(value)}", param=param, code="invalid_type")


def wrong_value(param: str, expected: str, value: object) -> RequestError:
    return RequestError(f"'{param}' must be {expected}, got: {echo(value)}", param=param, code="invalid_value")


def missing(param: str) -> RequestError:
    return RequestError(f"'{param}' is required", param=param, code="missing_required_parameter")


def unsupported(param: str, why: str) -> RequestError:
    return RequestError(f"'{param}' is not supported: {why}", param=param, code="unsupported_parameter")


def unsupported_value(param: str, why: str) -> RequestError:
    return RequestError(f"'{param}' is not supported: {why}", param=param, code="unsupported_value")


def as_object(value: object, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    return value


def as_list(value: object, param: str, *, low: int = 0, high: int) -> list[Any]:
    if not isinstance(value, list):
        raise wrong_type(param, "a list", value)
    if not low <= len(value) <= high:
        raise wrong_value(param, f"a list of {low} to {high}", value)
    return value


def as_text(value: object, param: str, *, low: int = 0, high: int | None = None) -> str:
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)
    if len(value) < low or (high is not None and len(value) > high):
        raise wrong_value(param, f"a string of {low} to {high} characters", value)
    return value


def as_int(value: object, param: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(param, "an integer", value)
    if not low <= value <= high:
        raise wrong_value(param, f"an integer from {low} to {high}", value)
    return value


def integer_of(text: str, header: str) -> int:
    """The value of a header. At most 64 bits: further on it travels in a message that has no more."""
    try:
        value = int(text)
    except ValueError as error:
        raise RequestError(f"header {header} must be an integer", param=header) from error
    return as_int(value, header, -INT64, INT64 - 1)


def as_float(value: object, param: str, low: float, high: float, *, above_low: bool = False) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise wrong_type(param, "a number", value)
    number = float(value)
    inside = math.isfinite(number) and (low < number if above_low else low <= number) and number <= high
    if not inside:
        bound = f"above {low:g}" if above_low else f"from {low:g}"
        raise wrong_value(param, f"a finite number {bound}" + (f" to {high:g}" if math.isfinite(high) else ""), value)
    return number


def as_bool(value: object, param: str) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(param, "a boolean", value)
    return value


def as_token_ids(value: object, param: str, vocab_size: int, *, low: int = 0, high: int) -> tuple[int, ...]:
    """A list of ids, each an integer below `vocab_size`."""
    ids = as_list(value, param, low=low, high=high)
    if set(map(type, ids)) <= {int}:
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
            return tuple(ids)
        index = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise wrong_value(f"{param}[{index}]", f"a token id from 0 to {vocab_size - 1}", ids[index])
    index = next(i for i, token in enumerate(ids) if type(token) is not int)
    raise wrong_type(f"{param}[{index}]", "an integer", ids[index])


class Fields:
    """The members of one object, read by name; null equals absent."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def given(self, name: str) -> bool:
        return self._values.get(name) is not None

    def require(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None:
            raise missing(self.path(name))
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._values.get(name)
        return None if value is None else as_int(value, self.path(name), low, high)

    def number(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        value = self._values.get(name)
        return None if value is None else as_float(value, self.path(name), low, high, above_low=above_low)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        return default if value is None else as_bool(value, self.path(name))

    def maybe_flag(self, name: str) -> bool | None:
        value = self._values.get(name)
        return None if value is None else as_bool(value, self.path(name))

    def text(self, name: str, *, low: int = 0, high: int | None = None) -> str | None:
        value = self._values.get(name)
        return None if value is None else as_text(value, self.path(name), low=low, high=high)

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        value = self.text(name)
        if value is not None and value not in allowed:
            raise wrong_value(self.path(name), "one of " + ", ".join(allowed), value)
        return value

    def members(self, name: str) -> Fields | None:
        value = self._values.get(name)
        return None if value is None else Fields(as_object(value, self.path(name)), self.path(name))

    def items(self, name: str, *, low: int = 0, high: int) -> list[Any] | None:
        value = self._values.get(name)
        return None if value is None else as_list(value, self.path(name), low=low, high=high)
