"""What can go wrong in a training run that no setting shows beforehand."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..errors import SolitonError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TrainError(SolitonError, RuntimeError):
    """A training run that cannot go on; what it has written before stays as it is."""


class NonFiniteError(TrainError):
    """A loss term or a gradient is NaN or infinite. ``step``: of the optimizer, from 1; ``term``: its name."""

    def __init__(self, message: str, *, step: int, term: str) -> None:
        super().__init__(message)
        self.step, self.term = step, term


class DiskError(TrainError):
    """A file that cannot be written: no room for it, or a failing disk."""


def check_space(folder: Path, needed: int, what: str) -> None:
    """DiskError unless ``folder``'s disk has ``needed`` bytes free; ``what`` begins the message."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskError(
            f"{what} needs {needed:,} bytes, but {folder} has {free:,} free; make room or choose another place"
        )


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Turn a failed write inside into a DiskError that names file and cause."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = (isinstance(error, OSError) and error.errno in FULL) or "No space left" in str(error)
        reason = "the disk is full" if full else getattr(error, "strerror", None) or str(error)
        raise DiskError(
            f"{what} cannot be written to {path} ({reason}); make room or choose another place. What was written "
            "before is intact"
        ) from error
