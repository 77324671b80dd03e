"""Reading a request's JSON: every field is taken by name and type, and what is left over is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import RequestError, nearest

DEEPEST = 64  # levels of a body; more is nobody's request
_NAMES = {
    bool: "true or false", int: "an integer", float: "a number", str: "a text", list: "a list", dict: "an object",
}  # fmt: skip


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request. RequestError for anything else, and for NaN, Infinity and half characters."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 ({error.reason} at byte {error.start})") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body is {_kind(value)}; a JSON object is needed")
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [x for v in level if isinstance(v, dict | list) for x in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return
    raise RequestError(f"the body is nested more than {DEEPEST} levels deep")


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return next((name for kind, name in _NAMES.items() if type(value) is kind), type(value).__name__)


class Body:
    """Fields of one JSON object, taken one by one. ``where``: its own place, for the names in messages."""

    def __init__(self, fields: Mapping[str, Any], where: str = "") -> None:
        self._left, self._where, self._known = dict(fields), where, set[str]()

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self._left.get(name) is not None

    def take(self, name: str, *kinds: type, default: Any = None) -> Any:
        """The value of a field; null is the same as absent. An integer is a number, a boolean is neither."""
        self._known.add(name)
        value = self._left.pop(name, None)
        if value is None:
            return default
        fits = type(value) in kinds or (float in kinds and type(value) is int)
        if not fits:
            wanted = " or ".join(_NAMES[kind] for kind in kinds)
            raise RequestError(f"{self.name(name)} is {_kind(value)}; {wanted} is needed", param=self.name(name))
        return value

    def one_of(self, name: str, choices: Iterable[str], default: str | None = None) -> str | None:
        """A text out of ``choices``."""
        value, known = self.take(name, str, default=default), list(choices)
        if value is not None and value not in known:
            raise RequestError(
                f"{self.name(name)} is {value!r}; it may be {', '.join(known)}{nearest(value, known)}",
                param=self.name(name),
            )
        return value

    def texts(self, name: str) -> list[str] | None:
        """A text or a list of texts, as a list."""
        value = self.take(name, str, list)
        items = [value] if isinstance(value, str) else value
        if items is not None and not all(isinstance(item, str) for item in items):
            raise RequestError(f"{self.name(name)} holds something that is no text", param=self.name(name))
        return items

    def body(self, name: str) -> Body | None:
        """An object inside."""
        value = self.take(name, dict)
        return None if value is None else Body(value, self.name(name))

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that mean nothing to one reader's server and do no harm."""
        for name in names:
            self._known.add(name)
            self._left.pop(name, None)

    def refuse(self, names: Mapping[str, str]) -> None:
        """Fields that would mean something, with the reason why they cannot; their neutral values pass."""
        for name, reason in names.items():
            self._known.add(name)
            if self._left.pop(name, None) not in (None, False, [], {}, 0, ""):
                raise RequestError(f"{self.name(name)} is not supported: {reason}", param=self.name(name))

    def rest(self) -> dict[str, Any]:
        """What nobody took yet, taken."""
        left, self._left = self._left, {}
        return left

    def end(self) -> None:
        """RequestError when a field is left."""
        for name in self._left:
            raise RequestError(f"unknown field {self.name(name)!r}{nearest(name, self._known)}", param=self.name(name))

    def name(self, field: str) -> str:
        """A field's name with its place."""
        return f"{self._where}.{field}" if self._where else field
