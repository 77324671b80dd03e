"""Everything here needs a CUDA device and is skipped without one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LIMIT_S = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """A kernel that never ends cannot be interrupted: the process goes, and names the test."""

    def leave() -> None:
        print(f"\n{request.node.nodeid} has not ended after {LIMIT_S:.0f} s: leaving", file=sys.__stderr__, flush=True)
        os._exit(70)

    timer = threading.Timer(LIMIT_S, leave)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()
