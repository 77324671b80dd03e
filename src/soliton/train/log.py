"""What a run says as it goes: lines of metrics, a bar, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import ConfigError
from .checkpoints import write_text
from .errors import writing

METRICS = "metrics.jsonl"


class Log:
    """metrics.jsonl of a run: an object a line with "split" and "step". Opening it drops the lines after ``step``,
    which a killed run wrote beyond its last checkpoint and this one will write again."""

    def __init__(self, root: Path, step: int, *, tensorboard: bool = False) -> None:
        self._path, self._board = root / METRICS, None
        self._last: dict[str, dict[str, Any]] = {}
        if tensorboard:
            try:
                self._board = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
                    str(root / "tensorboard")
                )
            except ImportError as error:
                raise ConfigError(f"tensorboard = True: {error}; pip install tensorboard, or leave it out") from error
        with writing(self._path, "the metrics"):
            root.mkdir(parents=True, exist_ok=True)
            kept = [line for line in _lines(self._path) if line["step"] <= step]
            write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
            self._last = {line["split"]: line for line in kept}
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, split: str, step: int, values: Mapping[str, Any]) -> None:
        """Add a line."""
        line = {"split": split, "step": step, **values}
        self._last[split] = line
        with writing(self._path, "the metrics"):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                for place, one in enumerate(value) if isinstance(value, list) else [("", value)]:
                    if isinstance(one, int | float):
                        self._board.add_scalar(f"{split}/{name}{place}", one, step)

    def last(self) -> dict[str, dict[str, Any]]:
        """The last line of each split."""
        return dict(self._last)

    def sync(self) -> None:
        """Force all lines to the disk."""
        with writing(self._path, "the metrics"):
            os.fsync(self._file.fileno())

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; a torn last one is none."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except ValueError:
            return


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int, Mapping[str, Any]], None]]:
    """A Report that moves a bar on stderr with loss, accept length, time and time to go; none without a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, line: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(what, total=None, now="")

        def move(done: int, total: int, line: Mapping[str, Any]) -> None:
            now = f"loss {line.get('loss', 0):.3f} · accept length {line.get('tau', 1):.2f}"
            shown.update(task, completed=done, total=total, now=now)

        yield move
