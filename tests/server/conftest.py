"""A server of its own process for the tests of a module, and small clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving import Served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """pebble with NEXTN and exact prefix reuse, on a CPU."""
    with Served("--prefix-reuse", "exact") as found:
        yield found
