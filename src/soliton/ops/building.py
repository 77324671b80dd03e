"""Says what is being built when a kernel is not kept from an earlier run: that can take so long that it looks stuck.

Whoever shows progress listens (``told``); what builds says so with ``building``. Compiles of Triton's are heard of when
they end, through Triton's own listener, since only then is it known that none was kept.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_listeners: list[Callable[[str], None]] = []
_compiled = 0


def building(what: str) -> None:
    """Tell every listener that ``what`` is being built."""
    for listener in tuple(_listeners):
        listener(what)


@contextmanager
def told(listener: Callable[[str], None]) -> Iterator[None]:
    """Call ``listener`` with a few words for each thing built inside."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def hear_compiles() -> None:
    """Pass on what Triton compiles from now on; another's listener stays, and so does silence without Triton."""
    try:
        knobs: Any = importlib.import_module("triton.knobs").compilation
    except (ImportError, AttributeError):
        return
    if getattr(knobs, "listener", None) is None:
        knobs.listener = _heard


def _heard(*, src: Any, cache_hit: bool, **_: Any) -> None:
    global _compiled
    if not cache_hit:
        _compiled += 1
        building(f"Triton kernels, {_compiled} so far, the last {getattr(src, 'name', 'of no name')}")
