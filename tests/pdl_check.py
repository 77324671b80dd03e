"""Which global accesses of a compiled kernel can run before it has waited for the kernels in front of it."""

from __future__ import annotations

import re
from collections.abc import Callable

_LABEL = re.compile(r"^\$?[\w$]+:")
_BRANCH = re.compile(r"^(?:@(?P<guard>!?%\w+)\s+)?bra(?:\.uni)?\s+(?P<to>[\w$]+)")
_GLOBAL = re.compile(
    r"\b(?:ld|st|atom|red|multimem)(?:\.\w+)*\.global\b|\bcp\.async\b|\bprefetch\b|\bcall\b"
    r"|\b(?:ld|st|atom|red)(?!(?:\.\w+)*\.(?:shared|local|param|const|global))(?:\.\w+)+\s"
)
_ENTRY = re.compile(r"\.entry\s+(\w+)[^{]*\{", re.S)


def _kernels(ptx: str) -> list[tuple[str, str]]:
    """Every kernel's name and the text between its outermost braces."""
    found = []
    for entry in _ENTRY.finditer(ptx):
        depth, end = 1, entry.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(ptx[end], 0)
            end += 1
        found.append((entry.group(1), ptx[entry.end() : end - 1]))
    return found


def _statements(body: str) -> list[str]:
    """A kernel's labels and instructions in order, without declarations, directives, comments and outer braces."""
    lines = []
    for line in re.sub(r"//[^\n]*", "", body).replace(";", ";\n").split("\n"):
        line = line.strip().removeprefix("{").strip()
        label = _LABEL.match(line)
        if label:
            lines.append(label.group())
            line = line[label.end() :].strip()
        if line and line != "}" and not line.startswith("."):
            lines.append(line.rstrip(";"))
    return lines


def _origins(lines: list[str]) -> Callable[[str], list[int]]:
    """From an access to the kernel's 64-bit parameters that its address is made of, by number."""
    made: dict[str, set[str]] = {}
    for line in lines:
        wide = re.match(r"(?:@\S+\s+)?ld\.param\.[ubs]64\s+(%\w+),\s*\[\w+?_param_(\d+)", line)
        words = re.findall(r"%\w+", line.partition(" ")[2] if line.startswith("@") else line)
        if wide:
            made.setdefault(wide[1], set()).add(wide[2])
        elif words and not line.startswith(("st.", "ld.global", "cp.")):
            made.setdefault(words[0], set()).update(words[1:])

    def origins(line: str) -> list[int]:
        pending = [word for place in re.findall(r"\[([^\]]*)\]", line) for word in re.findall(r"%\w+", place)]
        seen: set[str] = set()
        while pending:
            word = pending.pop()
            if word not in seen:
                seen.add(word)
                pending.extend(made.get(word, ()))
        return sorted(int(word) for word in seen if word.isdigit())

    return origins


def unwaited(ptx: str) -> dict[str, list[tuple[str, list[int]]]]:
    """By kernel: accesses to global memory that some path reaches without ``griddepcontrol.wait``.

    Each as its operation and the numbers of the 64-bit parameters that its addresses are made of. Any load, store,
    atomic or copy that is not certainly to shared, local, parameter or constant memory counts, and so does a call. A
    kernel that never waits has its whole body listed, behind an entry that says so.
    """
    found = {}
    for name, body in _kernels(ptx):
        lines = _statements(body)
        origins = _origins(lines)
        places = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
        never = not any("griddepcontrol.wait" in line for line in lines)
        early: list[tuple[str, list[int]]] = [("never waits", [])] if never else []
        pending, seen = [0], set()
        while pending:
            at = pending.pop()
            while at < len(lines) and at not in seen:
                seen.add(at)
                line = lines[at]
                if "griddepcontrol.wait" in line:
                    break
                if _GLOBAL.search(line):
                    early.append((re.sub(r"^@\S+\s+", "", line).split()[0], origins(line)))
                branch = _BRANCH.match(line)
                if "brx.idx" in line:
                    pending.extend(places.values())  # a table of targets: any of them
                    break
                if branch:
                    pending.append(places[branch["to"]])
                    if branch["guard"] is None:
                        break
                if line in ("ret", "exit"):
                    break
                at += 1
        found[name] = early
    return found
