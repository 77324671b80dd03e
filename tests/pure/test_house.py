"""The house rules that a machine can keep: the map equals the tree, sizes, words, lazy triton, the public surface."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest

from soliton.binder import OTHER_VARIABLES
from soliton.config import EngineConfig, add_arguments, settings
from soliton.server.config import ServerConfig

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src" / "soliton"
CEILING = {"*.py": 24_000, "*.cu*": 2_000}
LONG = 400

# The public surface. A change here is a change for users: say so in the log.
PUBLIC_NAMES = [
    "BusyError",
    "CheckpointError",
    "ConfigError",
    "Engine",
    "Generation",
    "MemoryPlanError",
    "Piece",
    "RequestError",
    "SamplingParams",
    "SolitonError",
    "Stats",
    "TokenLogprob",
    "UnsupportedError",
]
PUBLIC_SETTINGS = [
    "model",
    "draft",
    "speculation",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "draft_verify",
    "draft_verify_tokens",
    "draft_threshold",
    "draft_costs",
    "draft_calibration",
    "device",
    "dtype",
    "router_dtype",
    "lm_head_dtype",
    "max_context",
    "run_ahead",
    "executor",
    "prefix_reuse",
    "memory_budget",
    "memory_fraction",
    "checkpoint_budget",
    "prefill_chunk",
    "threads",
    "seed",
]
PUBLIC_ALIASES = [
    "--chunked-prefill-size",
    "--context-length",
    "--mem-fraction-static",
    "--model-path",
    "--random-seed",
    "--speculative-algorithm",
    "--speculative-dspark-block-size",
    "--speculative-dspark-confidence-sts-path",
    "--speculative-draft-model-path",
]


@cache
def text_files() -> tuple[Path, ...]:
    """Every text file that is or would be committed, but for .jsonl: collections of other people's text."""
    try:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, text=True).stdout
        names = [name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = []
    paths = [REPOSITORY / name for name in names] if names else unlisted()
    paths = [path for path in paths if path.is_file() and path.suffix != ".jsonl"]
    return tuple(path for path in paths if b"\0" not in path.read_bytes()[:8192])


def unlisted() -> list[Path]:
    """The same without git, as in an unpacked archive."""
    skipped = {"build", "dist", "__pycache__"}
    hidden = {".ci", ".gitignore", ".github"}
    found = []
    for path in REPOSITORY.rglob("*"):
        parts = path.relative_to(REPOSITORY).parts
        if path.suffix != ".log" and all(
            part not in skipped and (not part.startswith(".") or part in hidden) for part in parts
        ):
            found.append(path)
    return found


def sources() -> dict[str, Path]:
    """Every module of the package by its path under src/soliton; an __init__ without code is left out."""
    files = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
    return {
        name: path
        for name, path in files.items()
        if path.name != "__init__.py" or ast.parse(path.read_text(encoding="utf-8")).body
    }


def table(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the first table under a heading, by the first cell without its code marks."""
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    assert f"\n## {heading}\n" in text, f"docs/{page} has no section '{heading}'"
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {row[0].strip().strip("`"): [cell.strip() for cell in row[1:]] for row in rows[2:]}


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


class TestMap:
    def test_names_every_module_once_and_nothing_else(self) -> None:
        rows, modules = set(table("architecture.md", "The map")), set(sources())
        assert not modules - rows, "modules without a row in docs/architecture.md, 'The map'"
        assert not rows - modules, "rows without a module in docs/architecture.md, 'The map'"

    def test_says_what_each_is_in_one_sentence(self) -> None:
        for path, (what,) in table("architecture.md", "The map").items():
            assert 10 < len(what) <= 160, f"{path}: one sentence, found {what!r}"


class TestSize:
    def test_the_whole_stays_under_its_ceiling(self) -> None:
        for files, most in CEILING.items():
            total = sum(lines_of(path) for path in SOURCE.rglob(files))
            assert 0 < total <= most, f"src/soliton has {total} lines in {files}, the ceiling is {most}"

    def test_long_files_have_a_reason_and_only_they(self) -> None:
        long = {name for name, path in sources().items() if lines_of(path) > LONG}
        assert set(table("architecture.md", f"Files over {LONG} lines")) == long


class TestWords:
    # In pieces, so that this file passes its own test.
    FORBIDDEN: ClassVar = {
        "a path of one machine": r"(?<![\w./])/" + r"(?:work|root|home)(?:/|\b)",
        "talk of how it was made": "this" + r"\s+session|issue" + r"\s+#",
        "the name of a package host": "pypi" + r"\.org|pythonhosted" + r"\.org|download\.pytorch" + r"\.org",
    }

    @pytest.mark.parametrize("what", FORBIDDEN)
    def test_no_leaks(self, what: str) -> None:
        pattern = re.compile(self.FORBIDDEN[what], re.IGNORECASE)
        assert found(pattern, text_files()) == []

    def test_nothing_but_tests_reaches_outside_the_repository(self) -> None:
        outside = [path for path in text_files() if path.relative_to(REPOSITORY).parts[0] != "tests"]
        assert found(re.compile(r"\.\./shared"), outside) == []


def found(pattern: re.Pattern[str], paths: list[Path] | tuple[Path, ...]) -> list[str]:
    hits = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if match := pattern.search(line):
                hits.append(f"{path.relative_to(REPOSITORY)}:{number}: {match[0]}")
    return hits


class TestImports:
    def test_triton_is_imported_inside_functions_only(self) -> None:
        early = [
            f"{name}:{node.lineno}"
            for name, path in sources().items()
            for node in early_imports(ast.parse(path.read_text(encoding="utf-8")))
            if any(module.split(".")[0] == "triton" for module in modules_of(node))
        ]
        ops = ("bulk", "draft", "draws", "kda", "markov", "mla", "norm", "stream", "verdict")
        beside = {f"ops/{op}_triton.py" for op in ops}
        assert {place.split(":")[0] for place in early} <= beside, "a machine without triton could not import these"

    def test_the_kernels_modules_are_imported_by_name_only(self) -> None:
        kernels = [
            f"{name}:{node.lineno}"
            for name, path in sources().items()
            if not name.endswith("_triton.py")
            for node in early_imports(ast.parse(path.read_text(encoding="utf-8")))
            if "_triton" in ast.dump(node)
        ]
        assert kernels == []

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("import triton", 1),
            ("import triton.language as tl", 1),
            ("if True:\n from triton import jit", 1),
            ("class A:\n import triton", 1),
            ("def f():\n import triton", 0),
        ],
    )
    def test_the_walk_tells_early_from_lazy(self, text: str, expected: int) -> None:
        assert len(early_imports(ast.parse(text))) == expected


def early_imports(node: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """Imports that run when the module is imported: any outside a function."""
    imports: list[ast.Import | ast.ImportFrom] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            imports.append(child)
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            imports += early_imports(child)
    return imports


def modules_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if node.level == 0 else []


class TestSurface:
    def test_names(self) -> None:
        import soliton

        assert sorted(soliton.__all__) == PUBLIC_NAMES
        assert all(hasattr(soliton, name) for name in PUBLIC_NAMES)

    def test_settings(self) -> None:
        assert [leaf.key for leaf in settings(EngineConfig)] == PUBLIC_SETTINGS

    def test_flags(self) -> None:
        parser = argparse.ArgumentParser(add_help=False)
        add_arguments(parser, EngineConfig)
        flags = [flag for action in parser._actions for flag in action.option_strings]
        own = ["--" + key.replace("_", "-") for key in PUBLIC_SETTINGS]
        assert sorted(flags) == sorted(own + PUBLIC_ALIASES)

    def test_the_environment_page_lists_every_variable(self) -> None:
        for cls, title in ((EngineConfig, "Settings"), (ServerConfig, "The server's")):
            expected = {}
            for leaf in settings(cls):
                default = "required" if leaf.key == "model" else "unset" if leaf.default is None else str(leaf.default)
                choices = f" ({', '.join(leaf.choices)})" if leaf.choices else ""
                expected[leaf.env] = [f"`{leaf.flags[0]}`", default, leaf.help + choices]
            assert table("environment.md", title) == expected
        assert table("environment.md", "Not settings") == {name: [text] for name, text in OTHER_VARIABLES.items()}
