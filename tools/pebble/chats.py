"""Chats made from documented functions: a request in words, an answer in code."""

from __future__ import annotations

import ast
import random
import textwrap
from collections.abc import Iterator

SYSTEM = "<role>SYSTEM</role>{}detailed thinking off<|role_end|>"
HUMAN = "<role>HUMAN</role>{}<|role_end|>"
ASSISTANT = "<role>ASSISTANT</role>\n<think></think>"

REQUESTS = (
    "Write a Python function `{name}`: {doc}",
    "Write a Python function `{name}` that does this: {doc}",
    "Write a function called `{name}` in Python. {doc}",
    "Please write the Python function `{name}({args})`. {doc}",
    "Implement `{name}({args})` in Python: {doc}",
    "I need a Python function named `{name}`. It should do the following: {doc}",
    "Can you write `def {name}({args})`? {doc}",
    "{doc} Write this as a Python function `{name}`.",
    'Complete this function:\n\ndef {name}({args}):\n    """{doc}"""',
)
EXPLAIN = ("What does it do?", "Explain the function.", "What is `{name}` for?", "Describe it in one sentence.")
ARGUMENTS = ("Which arguments does `{name}` take?", "What are its parameters?", "List the arguments.")
SYSTEMS = ("", "", "", "You are a helpful assistant.\n", "You write Python.\n", "Answer with code only.\n")


def functions(source: str) -> Iterator[tuple[str, str, str, str]]:
    """Name, arguments, first paragraph of the docstring and dedented source of documented functions."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        doc = ast.get_docstring(node)
        if not doc:
            continue
        summary = " ".join(doc.split("\n\n")[0].split())
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if 20 <= len(summary) <= 240 and 80 <= len(code) <= 1500 and code.startswith("def "):
            yield node.name, ", ".join(a.arg for a in node.args.args), summary, code


def without_docstring(code: str) -> str:
    """The function without its docstring."""
    node = ast.parse(code).body[0]
    if len(node.body) < 2:
        return code
    lines = code.split("\n")
    first = node.body[0]
    return "\n".join(lines[: first.lineno - 1] + lines[first.end_lineno :]).strip("\n")


def requests(name: str, args: str, summary: str, code: str, rng: random.Random) -> list[dict]:
    """Messages of one chat: a request and its answer, at times a second turn about it."""
    request = rng.choice(REQUESTS).format(name=name, args=args, doc=summary)
    answer = without_docstring(code) if rng.random() < 0.5 else code
    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    system = rng.choice(SYSTEMS)
    if system:
        messages.insert(0, {"role": "system", "content": system.strip()})
    second = rng.random()
    if second < 0.15:
        messages += [
            {"role": "user", "content": rng.choice(EXPLAIN).format(name=name)},
            {"role": "assistant", "content": f"`{name}`: {summary}"},
        ]
    elif second < 0.25:
        listed = ", ".join(f"`{a}`" for a in args.split(", ")) if args else "no arguments"
        messages += [
            {"role": "user", "content": rng.choice(ARGUMENTS).format(name=name)},
            {"role": "assistant", "content": f"It takes {listed}."},
        ]
    return messages


def render(messages: list[dict], open_turn: bool = False) -> str:
    """The Ling-3 chat form, thinking off; ``open_turn`` ends with the generation prompt."""
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"] + "\n", messages[1:]
    text = SYSTEM.format(system)
    for message in messages:
        if message["role"] == "user":
            text += HUMAN.format(message["content"])
        else:
            text += ASSISTANT + message["content"] + "<|role_end|>"
    return text + (ASSISTANT if open_turn else "")
