"""A grammar of one call that has to be made: what the parser reads back as arguments that the tool's schema allows.

An argument that the parser takes as it stands (see ``arguments.is_text``) is written raw, so a schema of such a text
becomes an expression over its letters; all others are JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint import Tokenizer
from ..errors import RequestError
from .arguments import is_text, kinds_of, listed, resolved, target
from .parsers import CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END

LONGEST = 4000  # characters of a text whose schema sets no bound
_NOT_HERE = ("anyOf", "oneOf", "allOf", "not", "if", "minProperties", "dependentRequired", "dependentSchemas")
_DEEPEST = 32  # schemas inside each other
# patterns are JavaScript's, whose classes are of ASCII; a slash would end the expression
_ESCAPE = re.compile(r"\\.|/", re.DOTALL)
_CLASSES = {
    "/": r"\/", r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]",
}  # fmt: skip


def call_grammar(tools: Sequence[Mapping[str, Any]], choice: str, tokenizer: Tokenizer | None) -> str:
    """Lark, as llguidance reads it, of one call of a tool that may be called: the arguments that its schema knows, in
    their order, each that is required and perhaps the others. choice: "required", or "=" and a tool's name.
    RequestError where a required argument can have no value."""
    key, key_end, value, value_end = (_tag(tokenizer, tag) for tag in (KEY, KEY_END, VALUE, VALUE_END))
    calls, terminals = [], [f"FREE: /[^<]{{0,{LONGEST}}}/"]
    for tool in tools:
        function = tool["function"]
        if choice not in ("required", f"={function['name']}"):
            continue
        schema = resolved(function.get("parameters") or {})
        required = schema.get("required") or []
        left = [word for word in _NOT_HERE if word in schema]
        missing = [name for name in required if name not in (schema.get("properties") or {})]
        if left or missing:
            what = f"{left[0]} beside its properties" if left else f"{missing[0]!r}, of which there is no property"
            raise RequestError(
                f"a call of {function['name']!r} cannot be forced: its parameters have {what}; list every argument "
                "as a property, or let tool_choice be auto",
                param="tools",
            )
        parts = [_quoted(function["name"] + "\n")]
        for name, kind in (schema.get("properties") or {}).items():
            written = _value(schema, name, kind, terminals)
            if written is None:
                if name in required:
                    where = f"the argument {name!r} of the tool {function['name']!r}"
                    raise RequestError(f"{where} is required, but no value is allowed", param="tools")
                continue
            pair = f'{key} {_quoted(name)} {key_end} "\\n" {value} {written} {value_end} "\\n"'
            parts.append(f"({pair}){'' if name in required else '?'}")
        calls.append(" ".join(parts))
    start = f'start: "\\n"? {_tag(tokenizer, CALL)} ({" | ".join(calls)}) {_tag(tokenizer, CALL_END)}'
    return "\n".join([start, *terminals])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _tag(tokenizer: Tokenizer | None, tag: str) -> str:
    """A tag in a grammar: its token where it is a special one, which no text stands for, or its text."""
    token = tokenizer.id_of(tag) if tokenizer is not None else None
    special = tokenizer is not None and token in tokenizer.special_ids
    return f"<[{token}]>" if special else json.dumps(tag)


def _value(root: Mapping[str, Any], name: str, kind: Any, terminals: list[str]) -> str | None:
    """An argument's value; None where there is none. Adds to the terminals what it needs."""
    if kind is False:
        return None
    if not isinstance(kind, Mapping) or not kind:
        return "FREE"
    kinds = kinds_of(root, name)
    if not is_text(kinds):
        shared = {word: root[word] for word in ("$defs", "definitions") if word in root}
        return f"%json {json.dumps({**shared, **kind})}"
    text = _text(kind, root)
    if text is not None:
        terminals.append(f"TEXT{len(terminals)}: {text or 'FREE'}")
    choices = [f"TEXT{len(terminals) - 1}"] if text is not None else []
    choices += ['"null"'] if kinds is not None and "null" in kinds else []
    return f"({' | '.join(choices)})" if choices else None


def _text(schema: Any, root: Mapping[str, Any], depth: int = 0) -> str | None:
    """The expression of the strings that a schema allows; empty where it does not say, None where it allows none."""
    if schema is False or depth > _DEEPEST:
        return None if schema is False else ""
    if not isinstance(schema, Mapping):
        return ""
    named = listed(schema, "type") or [schema.get("type", "string")]
    if "string" not in named:
        return None
    found: list[str | None] = [_letters(schema)]
    if "enum" in schema or "const" in schema:
        texts = [v for v in [*listed(schema, "enum"), schema.get("const")] if isinstance(v, str)]
        found.append("(" + " | ".join(map(_quoted, dict.fromkeys(texts))) + ")" if texts else None)
    found += [_text(one, root, depth + 1) for one in listed(schema, "allOf")]
    for word in ("anyOf", "oneOf"):
        if choices := [_text(one, root, depth + 1) for one in listed(schema, word)]:
            some = [choice for choice in choices if choice is not None]
            found.append(None if not some else "" if "" in some else "(" + " | ".join(some) + ")")
    if isinstance(reference := schema.get("$ref"), str):
        found.append(_text(target(reference, root), root, depth + 1))
    parts = [part for part in found if part is not None]
    if len(parts) < len(found):
        return None
    return " & ".join(f"({part})" for part in dict.fromkeys(parts) if part)


def _letters(schema: Mapping[str, Any]) -> str:
    """Of minLength, maxLength and pattern. A text without a list of values holds no <, with which its end begins."""
    given = [schema.get(word) for word in ("minLength", "maxLength")]
    least, most = (int(v) if isinstance(v, int | float) and not isinstance(v, bool) else None for v in given)
    pattern, parts = schema.get("pattern"), []
    one = "(?s:.)" if "enum" in schema or "const" in schema else "[^<]"
    if least is not None or most is not None:
        low = least or 0
        parts.append(f"/{one}{{{low},{max(low, LONGEST) if most is None else min(most, max(low, LONGEST))}}}/")
    if isinstance(pattern, str):
        # a pattern may stand anywhere in the text unless it is bound to an end
        inner = _ESCAPE.sub(lambda found: _CLASSES.get(found[0], found[0]), pattern)
        parts.append(f"/{_unbound(inner)}/")
        parts += ["FREE"] if one == "[^<]" else []
    return " & ".join(parts)


def _unbound(pattern: str) -> str:
    """The whole text in which a pattern is found, without the pattern's anchors at its ends."""
    head, tail = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[head : len(pattern) - tail]
    return f"{'' if head else '(?s:.*)'}({inner}){'' if tail else '(?s:.*)'}"
