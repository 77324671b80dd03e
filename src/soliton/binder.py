"""The strict binder: settings from flags over environment over file, for any frozen dataclass made of ``setting``s.

A class is the single source of a setting: its type, default, range, help text, flag and environment variable. Whatever
does not fit is refused with the key, the value, what was expected and the nearest name; nothing is guessed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import numbers
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from soliton.errors import ConfigError, nearest

ENV_PREFIX = "SOLITON_"
# Variables with the prefix that are not settings, each with its sentence for docs/environment.md.
OTHER_VARIABLES = {
    "SOLITON_COMMIT": "The commit that a measurement names, where the source is no git clone.",
    "SOLITON_SHARED": "Tests: the directory that holds `conformance/`; `shared` beside the repository when unset.",
    "SOLITON_SMG": "Tests: the executable of the router `smg`; found on the path when unset.",
    "SOLITON_TEST_THREADS": "Tests: torch threads; 2 when unset.",
}
TABLES = ("server",)  # of a file, that belong to another class than the engine's
T = TypeVar("T")

_UNITS = {"": 1, "b": 1, **{p + "ib": 1 << 10 * (i + 1) for i, p in enumerate("kmgt")}}
_UNITS |= {p + "b": 1000 ** (i + 1) for i, p in enumerate("kmgt")}
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def setting(
    text: str,
    *,
    default: Any = MISSING,
    choices: tuple[str, ...] = (),
    unit: str = "",
    low: int | None = None,
    high: int | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with what the flags, the environment page and the messages need to know about it."""
    meta = {"help": text, "choices": choices, "unit": unit, "low": low, "high": high, "aliases": aliases}
    return field(default=default, metadata=meta)


def parse_size(value: int | str | None, key: str) -> int | None:
    """Bytes from a count or a text such as "8GiB" or "500MB"; None stays None."""
    if value is None or isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)\s*", value)
    if not match or match[2].lower() not in _UNITS or ("." in match[1] and not match[2]):
        raise ConfigError(f"{key} = {value!r}: expected bytes, as a count or a text such as 8GiB or 500MB")
    unit = _UNITS[match[2].lower()]
    return int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One leaf of a config class, as flags, environment and messages see it."""

    path: tuple[str, ...]
    types: tuple[type, ...]
    default: Any
    help: str
    choices: tuple[str, ...]
    unit: str
    low: int | None
    high: int | None
    aliases: tuple[str, ...]

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.path[-1].upper()

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--" + self.path[-1].replace("_", "-"), *self.aliases)

    @property
    def expected(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        text = " or ".join(names[t] for t in self.types if t is not type(None))
        if self.unit == "bytes":
            return "bytes, as a count or a text such as 8GiB"
        text += f" of {self.unit}" if self.unit else ""
        if self.low is not None and self.high is not None:
            text += f" from {self.low} to {self.high}"
        elif self.low is not None:
            text += f", at least {self.low}"
        return text + (", or none" if type(None) in self.types else "")


def settings(cls: type) -> tuple[Setting, ...]:
    """The leaves of a config class in order; a field that is itself a config class contributes its own leaves."""
    hints = typing.get_type_hints(cls)
    found: list[Setting] = []
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            inner = settings(typing.cast(type, hint))
            found += [dataclasses.replace(leaf, path=(item.name, *leaf.path)) for leaf in inner]
        else:
            meta = dict(item.metadata)
            types = typing.get_args(hint) or (hint,)
            found.append(Setting(path=(item.name,), types=types, default=item.default, **meta))
    return tuple(found)


def check(config: Any) -> None:
    """Types, choices and ranges of a config's own fields; a class calls it first in ``__post_init__``."""
    for leaf in settings(type(config)):
        if len(leaf.path) == 1:
            value = getattr(config, leaf.key)
            if isinstance(value, numbers.Integral) and not isinstance(value, bool | int):
                value = int(value)  # numpy's
                object.__setattr__(config, leaf.key, value)
            _check_value(leaf, value, leaf.key)


def _check_value(leaf: Setting, value: Any, label: str) -> None:
    wrong = type(value) not in (*leaf.types, *([int] if float in leaf.types else []))
    if not wrong and leaf.choices:
        wrong = value not in leaf.choices
    if not wrong and leaf.unit == "bytes":
        value = parse_size(value, label)
    if not wrong and isinstance(value, int | float) and not isinstance(value, bool):
        wrong = (leaf.low is not None and value < leaf.low) or (leaf.high is not None and value > leaf.high)
        wrong = wrong or not math.isfinite(value)
    if wrong:
        hint = nearest(value.lower(), leaf.choices) if isinstance(value, str) else ""
        raise ConfigError(f"{label} = {value!r}: expected {leaf.expected}{hint}")


def _from_text(leaf: Setting, text: str) -> Any:
    """A flag's or variable's text as the setting's type; text that fits none is returned for the check to refuse."""
    low = text.strip().lower()
    if type(None) in leaf.types and low == "none":
        return None
    if leaf.choices:
        return low
    if bool in leaf.types and low in _WORDS:
        return _WORDS[low]
    for kind in (int, float):
        if kind in leaf.types:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def bind(
    cls: type[T],
    *,
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: str | Path | None = None,
    defaults: Mapping[str, Any] | None = None,
    table: str | None = None,
) -> T:
    """A config from flags over environment over file over defaults. ``flags`` are by key, as ``flags_given`` returns;
    ``defaults`` stand in for those of the class; ``table``: the file's table that is meant, else all but TABLES.

    Every value is checked, also one that a stronger source replaces. Texts become numbers only from flags and the
    environment; a file has to use its own types. Nested configs are tables in the file.
    """
    leaves = {leaf.key: leaf for leaf in settings(cls)}
    values: dict[str, Any] = dict(defaults or {})
    found = _read(file) if file is not None else {}
    found = found.get(table, {}) if table else {key: value for key, value in found.items() if key not in TABLES}
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: {table} is {found!r}; a table of settings is needed")
    for key, value in _flatten(found, leaves):
        if key not in leaves:
            raise ConfigError(f"{file}: unknown key {key!r}{nearest(key, leaves)}")
        _check_value(leaves[key], value, f"{file}: {key}")
        values[key] = value
    check_environment(cls, env or {})
    by_env = {leaf.env: leaf for leaf in leaves.values()}
    for name, text in (env or {}).items():
        if name in by_env:
            values[by_env[name].key] = _converted(by_env[name], text, name)
    for key, value in (flags or {}).items():
        if key not in leaves:
            raise ConfigError(f"unknown setting {key!r}{nearest(key, leaves)}")
        values[key] = _converted(leaves[key], value, leaves[key].flags[0])
    for leaf in leaves.values():
        if leaf.key not in values and leaf.default is MISSING:
            raise ConfigError(f"{leaf.key} is not set: give {leaf.flags[0]}, {leaf.env}, or {leaf.key} in a file")
    return _build(cls, values, "")


def check_environment(classes: type | tuple[type, ...], env: Mapping[str, str]) -> None:
    """Refuse variables with the package's prefix that no setting of ``classes`` has, as ``bind`` does for one."""
    owners = classes if isinstance(classes, tuple) else (classes,)
    known = [*(leaf.env for cls in owners for leaf in settings(cls)), *OTHER_VARIABLES]
    for name in env:
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(f"environment variable {name} is not known{nearest(name, known)}")


def _converted(leaf: Setting, value: Any, label: str) -> Any:
    if isinstance(value, str):
        value = _from_text(leaf, value)
    _check_value(leaf, value, label)
    return value


def _read(file: str | Path) -> dict[str, Any]:
    path = Path(file)
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{path}: a config file ends in .toml or .json")
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()} ({error})") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: expected a table of settings, found {type(table).__name__}")
    return table


def _flatten(table: dict[str, Any], leaves: Iterable[str], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and any(leaf.startswith(key + ".") for leaf in leaves):
            yield from _flatten(value, leaves, key + ".")
        else:
            yield key, value


def _build(cls: type[T], values: Mapping[str, Any], prefix: str) -> T:
    hints = typing.get_type_hints(cls)
    given: dict[str, Any] = {}
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        key = prefix + item.name
        if dataclasses.is_dataclass(hints[item.name]):
            given[item.name] = _build(hints[item.name], values, key + ".")
        elif key in values:
            given[item.name] = values[key]
    return cls(**given)


def add_arguments(parser: argparse.ArgumentParser, cls: type) -> None:
    """One flag for each setting of ``cls``, absent from the namespace unless given."""
    for leaf in settings(cls):
        default = "" if leaf.default is MISSING or leaf.default is None else f"; default {leaf.default}"
        text = f"{leaf.help} [{leaf.env}{default}]".replace("%", "%%")
        metavar = "{" + ",".join(leaf.choices) + "}" if leaf.choices else (leaf.unit or leaf.path[-1]).upper()
        if bool in leaf.types:
            toggle = argparse.BooleanOptionalAction
            parser.add_argument(*leaf.flags, dest=leaf.key, action=toggle, default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(*leaf.flags, dest=leaf.key, metavar=metavar, default=argparse.SUPPRESS, help=text)


def own_variables(cls: type, env: Mapping[str, str]) -> dict[str, str]:
    """The variables that belong to settings of ``cls``, where ``env`` was checked for several classes."""
    known = {leaf.env for leaf in settings(cls)}
    return {name: value for name, value in env.items() if name in known}


def flags_given(namespace: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The settings of ``cls`` that the command line named, by key, for ``bind``."""
    given = vars(namespace)
    return {leaf.key: given[leaf.key] for leaf in settings(cls) if leaf.key in given}
