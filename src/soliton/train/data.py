"""Sequences to train on: answers of the target at several sampling settings, or texts, with loss masks, in one file.

A file is JSONL: a head (format, target, settings), one line a sequence, a foot with the count and the SHA-256 of the
lines between. It is written beside its name and renamed when whole; what an interrupted run wrote is taken up again.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ConfigError, RequestError
from ..sampling.params import SamplingParams
from .errors import writing

if TYPE_CHECKING:
    from ..engine import Engine

FORMAT = 1
LEAST = 14  # supervised tokens; DeepSpec drops shorter samples
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sample:
    """ids: token ids; spans: [start, end) of supervised tokens; source: where they come from."""

    ids: Sequence[int]
    spans: tuple[tuple[int, int], ...]
    source: Mapping[str, Any] = field(default_factory=dict)

    def mask(self, length: int | None = None) -> Tensor:
        """bool [n], of the first ``length`` tokens."""
        out = torch.zeros(len(self.ids), dtype=torch.bool)
        for start, end in self.spans:
            out[start:end] = True
        return out[:length]

    def line(self) -> str:
        """As the file holds it."""
        return json.dumps({"ids": list(self.ids), "spans": self.spans, "source": self.source}, separators=(",", ":"))


@dataclass(frozen=True)
class Dataset:
    """A whole file. ``digest``: SHA-256 of its sequences, hexadecimal."""

    samples: tuple[Sample, ...]
    head: Mapping[str, Any]
    digest: str


def mixed(*parts: object) -> int:
    """A seed from 0 to 2**63 - 1 for what ``parts`` name, the same everywhere."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


# -- making ----------------------------------------------------------------------------------------------------------


def read_prompts(path: str | Path) -> list[Any]:
    """Prompts of a JSONL file, each a text ("prompt") or messages ("messages")."""
    found = []
    for place, record in _records(Path(path)):
        prompt = record.get("prompt", record.get("messages"))
        if not isinstance(prompt, str | list):
            raise ConfigError(f'{path}: line {place} has neither a "prompt" nor "messages"; give one of them')
        found.append(prompt)
    return found


def answer(
    engine: Engine,
    prompts: Sequence[Any],
    settings: Sequence[SamplingParams],
    out: str | Path,
    *,
    answers: int = 1,
    seed: int = 0,
    least: int = LEAST,
    progress: Progress | None = None,
) -> Dataset:
    """Let the target answer each prompt under ``answers`` of the settings, which take turns, and keep it in ``out``.

    Each answer has a seed of its own, so an interrupted call goes on where it was and gives the same file. Answers
    shorter than ``least`` tokens are left out, and so are prompts that the engine refuses (counted in the foot).
    """
    if not settings or answers < 1:
        raise ConfigError(f"{len(settings)} sampling settings and {answers} answers a prompt: at least 1 of each")
    head = {
        "target": engine.checkpoint.name,
        "settings": [_plain(s) for s in settings],
        "answers": answers,
        "seed": seed,
        "prompts": hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest(),
        "least": least,
    }

    def one(task: int) -> Sample | None:
        prompt, turn = divmod(task, answers)
        at = (prompt + turn) % len(settings)
        params = dataclasses.replace(settings[at], seed=mixed(seed, prompt, turn))
        try:
            made = engine.generate(prompts[prompt], params)
        except RequestError:
            return None
        if len(made.token_ids) < least:
            return None
        source = {"prompt": prompt, "setting": at, "seed": params.seed, "finish": made.finish_reason}
        ids = (*made.prompt_ids, *made.token_ids)
        return Sample(ids, ((len(made.prompt_ids), len(ids)),), source)

    return _write(Path(out), head, len(prompts) * answers, one, progress)


def from_texts(
    engine: Engine,
    paths: Iterable[str | Path],
    out: str | Path,
    *,
    max_length: int = 2048,
    least: int = LEAST,
) -> Dataset:
    """Sequences from text files (cut every ``max_length`` tokens, all supervised) and from JSONL files with "text", or
    "prompt" and "completion" (supervised) a line. Nobody's samples: a draft learns less from them than from answers."""
    pieces: list[Sample] = []
    for path in map(Path, paths):
        texts = _records(path) if path.suffix == ".jsonl" else [(0, {"text": _text(path)})]
        for place, record in texts:
            first, rest = record.get("prompt", ""), record.get("completion", record.get("text"))
            if not isinstance(rest, str) or not isinstance(first, str):
                raise ConfigError(f'{path}: line {place} has neither "text" nor "prompt" and "completion"')
            start = len(engine.encode(first)) if first else 0
            ids = engine.encode(first + rest) if first + rest else []
            for at in range(0, len(ids), max_length):
                part = ids[at : at + max_length]
                span = (max(start - at, 0), len(part))
                if span[1] - span[0] >= least:
                    pieces.append(Sample(tuple(part), (span,), {"file": path.name, "line": place, "token": at}))
    head = {"target": engine.checkpoint.name, "max_length": max_length, "least": least}
    return save(pieces, out, head)


def save(samples: Sequence[Sample], out: str | Path, head: Mapping[str, Any]) -> Dataset:
    """Keep sequences made elsewhere; ``head`` should name the target."""
    out = Path(out)
    out.with_name(out.name + ".part").unlink(missing_ok=True)  # of other samples, perhaps
    return _write(out, dict(head), len(samples), lambda task: samples[task], None)


def _write(
    out: Path, head: Mapping[str, Any], tasks: int, one: Callable[[int], Sample | None], progress: Progress | None
) -> Dataset:
    part = out.with_name(out.name + ".part")
    first = json.dumps({"format": FORMAT, **head})
    with writing(out, "the data"):
        out.parent.mkdir(parents=True, exist_ok=True)
        done = _taken_up(part, first)
        with part.open("a", encoding="utf-8") as file:
            if not done:
                file.write(first + "\n")
            for task in range(max(len(done) - 1, 0), tasks):
                sample = one(task)
                file.write(("null" if sample is None else sample.line()) + "\n")
                file.flush()
                if progress is not None:
                    progress(task + 1, tasks)
        lines = _lines(part.read_text(encoding="utf-8"))[1:]
        kept = [line for line in lines if line != "null"]
        if not kept:
            part.unlink()
            raise ConfigError(f"{out}: none of {tasks} sequences is long enough or could be made; give other prompts")
        foot = json.dumps({"count": len(kept), "left_out": len(lines) - len(kept), "sha256": _digest(kept)})
        whole = out.with_name(out.name + ".tmp")
        with whole.open("w", encoding="utf-8") as file:
            file.write("\n".join([first, *kept, foot]) + "\n")
            file.flush()
            os.fsync(file.fileno())
        whole.replace(out)
        part.unlink()
    return load(out)


def _taken_up(part: Path, first: str) -> list[str]:
    """Whole lines of an interrupted run of the same call; the file then ends behind them. ConfigError for another's."""
    if not part.exists():
        return []
    text = part.read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")[:-1]
    if lines and lines[0] != first:
        raise ConfigError(
            f"{part} holds {len(lines) - 1} answers of an interrupted call with other settings; repeat those settings, "
            "choose another file, or remove it"
        )
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lines


# -- reading ---------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Dataset:
    """A file made here, checked whole; ConfigError names what is wrong with it."""
    path = Path(path)
    lines = _lines(_text(path))
    try:
        head, foot = json.loads(lines[0]), json.loads(lines[-1])
        wrong = head["format"] != FORMAT or foot["count"] != len(lines) - 2 or foot["sha256"] != _digest(lines[1:-1])
        records = [json.loads(line) for line in lines[1:-1]]
        samples = tuple(
            Sample(array("i", r["ids"]), tuple((int(a), int(b)) for a, b in r["spans"]), r["source"]) for r in records
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{path}: not a whole file of sequences made by this trainer ({error!r}); make it") from error
    for place, sample in enumerate(samples, 1):
        if not sample.ids or any(not 0 <= a < b <= len(sample.ids) for a, b in sample.spans):
            raise ConfigError(
                f"{path}: sequence {place} has {len(sample.ids)} tokens and the spans {list(sample.spans)}; make it "
                "again"
            )
    if not samples:
        raise ConfigError(f"{path}: no sequence in it; make it again")
    if wrong:
        raise ConfigError(f"{path}: its {len(lines) - 2} sequences are not those that its foot vouches for; make it")
    return Dataset(samples, head, foot["sha256"])


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _plain(params: SamplingParams) -> dict[str, Any]:
    """The values that are not at their defaults."""
    return {
        f.name: getattr(params, f.name)
        for f in dataclasses.fields(params)
        if f.name != "seed" and getattr(params, f.name) != f.default
    }


def _lines(text: str) -> list[str]:
    """Lines of JSON: ended by a newline alone, since its texts may hold every other separator of lines."""
    return text.removesuffix("\n").split("\n")


def _text(path: Path) -> str:
    try:
        return (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for place, line in enumerate(_lines(_text(path)), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}: line {place} is not JSON ({error})") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{path}: line {place} is no object")
            yield place, record


# -- taking ----------------------------------------------------------------------------------------------------------


def candidates(mask: Tensor) -> Tensor:
    """int64 [n]: places t where t and t + 1 are supervised, mask bool [L]."""
    return (mask[:-1] & mask[1:]).nonzero()[:, 0]


def sample_anchors(mask: Tensor, count: int, seed: int) -> Tensor:
    """int64 [at most count]: candidates drawn without replacement, ascending."""
    found = candidates(mask)
    if found.shape[0] > count:
        order = torch.randperm(found.shape[0], generator=torch.Generator().manual_seed(seed))
        found = found[order[:count]].sort().values
    return found


def order(seed: int, count: int, start: int, number: int) -> list[tuple[int, int]]:
    """(epoch, index) of places start .. start + number - 1 in the endless run of epochs, each shuffled anew."""
    found, shuffled = [], (-1, [0])
    for place in range(start, start + number):
        epoch, at = divmod(place, count)
        if shuffled[0] != epoch:
            g = torch.Generator().manual_seed(mixed(seed, "order", epoch))
            shuffled = (epoch, torch.randperm(count, generator=g).tolist())
        found.append((epoch, shuffled[1][at]))
    return found
