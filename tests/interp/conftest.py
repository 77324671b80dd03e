"""Triton kernels in Triton's interpreter, on any machine that has triton; skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports triton. Kernels compiled for a device in the same process would be interpreted too.
if importlib.util.find_spec("triton") is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _unchained() -> Iterator[None]:
    """Waiting for the kernel in front is nothing that can be interpreted."""
    from soliton.ops.chain import unchained

    with unchained():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("triton") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="triton is not installed: its kernels are not interpreted"))
