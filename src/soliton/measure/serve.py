"""What a server costs beside the engine alone: the same prompts, in turns, both loaded on one machine.

TPOT is the time from an answer's SETTLED-th token or so to its last over the tokens between, as the reader of the
engine's stream sees it in this process, and as a client of `soliton serve` sees it on a socket. Not from the first: a
socket's first event waits for the response's head to be written and read, some half a millisecond, and the time left
would read as a faster step.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from ..binder import settings
from ..config import EngineConfig
from ..engine import Engine
from ..errors import ConfigError
from ..sampling.params import SamplingParams
from .about import commit, device_name, driver, sampling_words
from .compare import LEAST, Load, spread
from .doctor import versions

SETTLED = 16  # tokens of an answer before its time is taken
CROWD, PAUSE_S = 200, 0.002  # of a storm: connections that do nothing; the time between two bad requests


@contextmanager
def serving(config: EngineConfig) -> Iterator[str]:
    """`soliton serve` of this config on a free port: its address once it is ready."""
    command = [sys.executable, "-m", "soliton", "serve", "--port", "0"]
    for leaf in settings(EngineConfig):
        value = getattr(config, leaf.key)
        if value is not None and value != leaf.default:
            command += [leaf.flags[0], str(value)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        said, url = [], ""
        for line in process.stderr:
            said.append(line.strip())
            url = line.split()[0] if line.startswith("http://") else url
            if line.startswith("ready:"):
                break
        else:
            raise ConfigError(f"the server did not start: {' '.join(said)}")
        yield url
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()  # type: ignore[union-attr]


@contextmanager
def storm(url: str) -> Iterator[None]:
    """CROWD connections that send half a request and wait, and one client that sends bad requests, each as soon as the
    last was refused, PAUSE_S between."""
    parts, over = urllib.parse.urlsplit(url), threading.Event()
    place = (str(parts.hostname), int(parts.port or 80))
    held = [socket.create_connection(place) for _ in range(CROWD)]
    for link in held:
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")

    def hammer() -> None:
        body = b'{"prompt": 7}'
        text = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        with socket.create_connection(place) as link:
            while not over.is_set():
                link.sendall(text)
                link.recv(4096)
                over.wait(PAUSE_S)

    thread = threading.Thread(target=hammer)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for link in held:
            link.close()


def prompts_for(engine: Engine, prompts: Sequence[Any] | None, count: int) -> list[list[int]]:
    """Token ids of the prompts, or of ``count`` made ones."""
    if prompts is not None:
        return [engine.encode(prompt) for prompt in prompts]
    vocab = engine.checkpoint.spec.vocab
    return [[(7919 * i + 31 * j) % vocab for j in range(64)] for i in range(count)]


def measure_serve(
    config: EngineConfig,
    prompts: Sequence[Any] | None,
    params: SamplingParams,
    *,
    count: int,
    load: Load,
    stormy: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Medians and quartiles of TPOT in µs of both, and of their ratio by prompt. ``different``: greedy answers that
    were not the same tokens. stormy: the server's clients are in ``storm`` meanwhile. ConfigError where too few answers
    are long enough."""
    with load(config) as engine, serving(config) as url:
        given = prompts_for(engine, prompts, count)
        asked = dataclasses.replace(params, ignore_eos=True)
        usual = dataclasses.asdict(SamplingParams())
        fields = {key: value for key, value in dataclasses.asdict(asked).items() if value != usual[key]}
        rows, different = [], 0

        def through(url: str, ids: list[int], fields: dict[str, Any]) -> tuple[list[int], float | None]:
            with storm(url) if stormy else nullcontext():
                return _through(url, ids, fields)

        for place, ids in enumerate([given[0], *given]):
            progress(place, len(given) + 1)
            ways = [lambda: _alone(engine, ids, asked), lambda: through(url, ids, fields)]  # noqa: B023 - called here
            one, two = [way() for way in ways] if place % 2 else [way() for way in ways[::-1]][::-1]
            different += one[0] != two[0]
            if place and one[1] is not None and two[1] is not None:  # the first warms both
                rows.append((one[1], two[1]))
        progress(len(given) + 1, len(given) + 1)
        if len(rows) < 2:
            raise ConfigError(f"{len(rows)} answers were long enough to time: give more prompts or a higher max_tokens")
        resolved = asked.resolve({}, vocab=engine.checkpoint.spec.vocab)
        runtime = engine._ready()
        return {
            "model": engine.checkpoint.name, "speculation": engine.config.speculation,
            "drafts": engine.config.speculative_num_steps or 0, "dtype": engine.config.dtype,
            "sampling": sampling_words(resolved), "max_tokens": params.max_tokens, "answers": len(rows),
            "storm": stormy,
            "device": device_name(runtime.parts.device), "different": different if resolved.greedy else None,
            "engine_us": spread([1e6 * a for a, _ in rows], 1), "server_us": spread([1e6 * b for _, b in rows], 1),
            "ratio": spread([b / a for a, b in rows], 4), "commit": commit(), "versions": versions(),
            "driver": driver(),
        }  # fmt: skip


def _alone(engine: Engine, ids: list[int], params: SamplingParams) -> tuple[list[int], float | None]:
    found: list[int] = []
    marks = []
    for piece in engine.stream(ids, params):
        found += piece.token_ids
        marks.append((time.perf_counter(), len(found)))
    return found, _tpot(marks)


def _through(url: str, ids: list[int], fields: dict[str, Any]) -> tuple[list[int], float | None]:
    body = {"input_ids": ids, "stream": True, "sampling_params": fields}
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode())
    marks, last = [], b""
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                marks.append((time.perf_counter(), line))
                last = line
    found = json.loads(last[6:])
    if "error" in found:
        raise ConfigError(f"the server refused: {found['error']['message']}")
    counted = [(at, json.loads(line[6:])["meta_info"]["completion_tokens"]) for at, line in marks]
    return found["output_ids"], _tpot(counted)


def _tpot(marks: Sequence[tuple[float, int]]) -> float | None:
    marks = [mark for mark in marks if mark[1] >= SETTLED]
    if not marks or marks[-1][1] - marks[0][1] < LEAST:
        return None
    return (marks[-1][0] - marks[0][0]) / (marks[-1][1] - marks[0][1])


def as_table(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of two words for a terminal."""

    def words(of: dict[str, float], unit: str) -> str:
        return f"{of['median']:g}{unit} ({of['q1']:g} to {of['q3']:g})"

    return [
        ("model", f"{report['model']}, {report['speculation']}, {report['sampling']}, on {report['device']}"),
        ("answers", f"{report['answers']} timed, {report['different'] or 0} with other tokens"),
        ("engine alone", f"TPOT {words(report['engine_us'], ' µs')}"),
        (
            "through the server" + (", in a storm" if report["storm"] else ""),
            f"TPOT {words(report['server_us'], ' µs')}",
        ),
        ("ratio", words(report["ratio"], "")),
    ]
