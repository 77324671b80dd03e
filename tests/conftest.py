"""Shared by all tests: where data lies, seeds, a fixed number of torch threads, and a loud count of absent data."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]
THREADS = int(os.environ.get("SOLITON_TEST_THREADS", "2"))
# The reason of a skip starts with this where a test needs the conformance data and it is not there.
ABSENT = "conformance data absent"

# Before anything imports torch: a torch product's bits depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.environ.setdefault("MKL_NUM_THREADS", str(THREADS))

settings.register_profile("house", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("house")


def shared_path() -> Path:
    """Where the shared directory should be; for parametrising over its contents at collection."""
    return Path(os.environ.get("SOLITON_SHARED") or REPOSITORY.parent / "shared")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The directory that holds conformance/, or a skip that the last lines of the run count."""
    path = shared_path()
    if not (path / "conformance").is_dir():
        pytest.skip(f"{ABSENT}: no {path / 'conformance'}; set SOLITON_SHARED to the directory that holds it")
    return path


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return REPOSITORY / "tests" / "data"


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(THREADS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    absent = sum(ABSENT in str(report.longrepr) for report in skipped)
    if absent:
        terminalreporter.write_sep("!", f"{absent} cases NOT RUN: {ABSENT}", red=True, bold=True)
        terminalreporter.write_line(
            f"Set SOLITON_SHARED to the directory that holds conformance/ (now {shared_path()})."
        )
