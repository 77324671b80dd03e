"""What a request's tools say of a call's arguments: which tools there are, and the JSON that a written value means.

A value stands in the text raw if it is a string and as JSON otherwise, so `true` may be a word or a boolean. Only the
tool's schema can tell; of a schema no more is read than the JSON types that it allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError, nearest

Kinds = frozenset[str]  # JSON types; an integer is a number here

# Characters of a string that are kept back while it may go on. One that the output's end cuts shorter can still be left
# out, as any unfinished value is, and null be told from a string; but nobody has to wait for a whole file.
HELD = 64

_ALL: Kinds = frozenset({"string", "number", "boolean", "object", "array", "null"})
_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
_NAME = r"[\w.:/-]{1,128}"  # of a tool
_DEEPEST = 32  # schemas inside each other


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """The schema of all arguments, by the tool's name. RequestError for a tool without a name, or without a schema
    where one should be."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for place, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        where = f"tools[{place}].function"
        if not isinstance(function, Mapping):
            raise RequestError(f"{where} is {function!r}; an object with the tool's name is needed", param=where)
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}.name is {name!r}; give the name to call it by", param=f"{where}.name")
        if schema is not None and not isinstance(schema, Mapping):
            raise RequestError(f"{where}.parameters is {schema!r}; give a JSON Schema", param=f"{where}.parameters")
        schemas[name] = schema or {}
    return schemas


def check_tool(place: int, tool: Any) -> None:
    """RequestError unless it is a function with a name and, if it has any, parameters as an object's schema."""
    where = f"tools[{place}]"
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise RequestError(f"{where} is no tool of type function", param=where)
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"{where}.function has no name", param=f"{where}.function.name")
    parameters = function.get("parameters")
    if not re.fullmatch(_NAME, function["name"]):
        raise RequestError(
            f"{where}.function.name may have letters, digits and _ . : / -", param=f"{where}.function.name"
        )
    where = f"{where}.function.parameters"
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"{where} is no object", param=where)
    known, required = (parameters or {}).get("properties", {}), (parameters or {}).get("required", [])
    if not isinstance(known, dict) or not all(isinstance(kind, dict | bool) for kind in known.values()):
        raise RequestError(f"{where}.properties is no object of schemas", param=f"{where}.properties")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{where}.required is no list of names", param=f"{where}.required")


def may_call(choice: Any, offered: Mapping[str, Any]) -> bool:
    """Whether calls are looked for. choice: a request's tool_choice; RequestError when it cannot be honoured."""
    if choice is None or choice in ("auto", "none"):
        return bool(offered) and choice != "none"
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice != "required" and not isinstance(name, str):
        raise RequestError(
            f'tool_choice is {choice!r}; give "auto", "none", "required" or the function to call', param="tool_choice"
        )
    if not offered:
        raise RequestError("tool_choice asks for a call, but no tools are offered; give tools", param="tool_choice")
    if isinstance(name, str) and name not in offered:
        known = f"tools offers {', '.join(offered)}{nearest(name, offered)}"
        raise RequestError(f"tool_choice names {name!r}, but {known}", param="tool_choice")
    return True


def kinds_of(schema: Mapping[str, Any] | None, key: str) -> Kinds | None:
    """The JSON types of one argument by the schema of all; None where that does not know the argument."""
    if schema is None:
        return None
    schema = resolved(schema)
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    if isinstance(properties, Mapping) and key in properties:
        return _kinds(properties[key], schema, {})
    return _kinds(others, schema, {}) if isinstance(others, Mapping) and others else None


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of all arguments where it is written as a reference to one of its own definitions."""
    found = schema
    for _ in range(_DEEPEST):
        if not isinstance(reference := found.get("$ref"), str):
            break
        inner = target(reference, schema)
        if not isinstance(inner, Mapping):
            break
        found = {**schema, "$ref": None, **inner}
    return found


def is_text(kinds: Kinds | None) -> bool:
    """Whether a value is the text as it stands, null apart."""
    return kinds is not None and "string" in kinds and kinds <= {"string", "null"}


def json_of(text: str, kinds: Kinds | None) -> str:
    """The JSON that a written value stands for. What is JSON already stays as it was written: reading and writing it
    again could cost digits."""
    bare = text.strip(" \t\r\n")
    if kinds is not None and is_text(kinds):
        return "null" if bare == "null" and "null" in kinds and len(text) <= HELD else quoted(text)
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(text)
    return quoted(text) if kinds is None and isinstance(value, str) else bare


def quoted(text: str) -> str:
    """A JSON string, letter by letter: pieces of a text become pieces of the string."""
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is Python's and no JSON")


def _kinds(schema: Any, root: Mapping[str, Any], seen: dict[str, Kinds], depth: int = 0) -> Kinds:
    """The JSON types that a schema allows; all where it does not say. seen: what references inside root came to."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return _ALL
    parts = [_kinds(one, root, seen, depth + 1) for one in listed(schema, "allOf")]
    for word in ("anyOf", "oneOf"):
        if choices := listed(schema, word):
            parts.append(frozenset().union(*(_kinds(one, root, seen, depth + 1) for one in choices)))
    named = [name for name in listed(schema, "type") or [schema.get("type")] if isinstance(name, str)]
    parts.append(_ALL.intersection("number" if name == "integer" else name for name in named) or _ALL)
    if values := listed(schema, "enum") or ([schema["const"]] if "const" in schema else []):
        parts.append(frozenset(_TYPES.get(type(value), "null") for value in values))
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in seen:
            seen[reference] = _ALL  # one that comes back to itself says nothing
            seen[reference] = _kinds(target(reference, root), root, seen, depth + 1)
        parts.append(seen[reference])
    allowed = _ALL.intersection(*parts) or _ALL  # a contradiction says nothing either
    return allowed | {"null"} if schema.get("nullable") is True else allowed


def listed(schema: Mapping[str, Any], word: str) -> list[Any]:
    """What a schema lists under a word."""
    value = schema.get(word)
    return value if isinstance(value, list) else []


def target(reference: str, root: Any) -> Any:
    """What a reference such as #/$defs/Mode stands for; None where it leads out of the schema."""
    for name in reference.split("/")[1:] if reference.startswith("#") else ["#"]:
        name = name.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root
