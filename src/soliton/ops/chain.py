"""Programmatic dependent launch of a step's kernels: each may start before the one in front of it has ended, and waits
before it touches what that one writes. On unless a test or a measurement turns it off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_on = True


def chained() -> bool:
    """Whether kernels are launched that way now. A captured graph keeps what held at its capture."""
    return _on


@contextmanager
def unchained() -> Iterator[None]:
    """Kernels start when the one in front has ended. The bits are the same; only time differs."""
    global _on
    before, _on = _on, False
    try:
        yield
    finally:
        _on = before
