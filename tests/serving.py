"""Starting a server as a user does, and talking to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import TracebackType
from typing import Any


class Served:
    """`soliton serve pebble` on a free port; ``url`` once it is ready."""

    def __init__(self, *flags: str, model: str = "pebble", ready: bool = True) -> None:
        threads = os.environ.get("SOLITON_TEST_THREADS", "1")
        command = [sys.executable, "-m", "soliton", "serve", model, "--port", "0", "--device", "cpu"]
        self.process = subprocess.Popen(
            [*command, "--threads", threads, *flags], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        self.said: list[str] = []
        self.url = self._line("http://").split()[0]
        if ready:
            self._line("ready:")

    def _line(self, start: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if line.startswith(start):
                return line
        raise AssertionError(f"the server ended with {self.process.wait()}: {''.join(self.said)}")

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def stop(self, number: int = signal.SIGTERM, within: float = 60) -> int:
        """Send a signal and wait; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(within)
        finally:
            self.process.kill()
            assert self.process.stderr is not None
            self.said += self.process.stderr.readlines()
            self.process.stderr.close()

    def call(
        self, path: str, body: Any = None, *, headers: dict[str, str] | None = None, raw: bytes | None = None,
        method: str | None = None, timeout: float = 120,
    ) -> tuple[int, dict[str, str], Any]:  # fmt: skip
        """(status, headers, body); JSON is read."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, found, text = answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            status, found, text = error.code, dict(error.headers), error.read()
        is_json = found.get("Content-Type", "").startswith("application/json")
        return status, found, json.loads(text) if is_json else text.decode()

    def ask(self, path: str, body: Any) -> Any:
        """The body of an answer that has to be good."""
        status, _, found = self.call(path, body)
        assert status == 200, found
        return found

    def events(self, path: str, body: Any, timeout: float = 120) -> Iterator[Any]:
        """The events of a stream, which has to end with [DONE]."""
        request = urllib.request.Request(self.url + path, json.dumps({**body, "stream": True}).encode())
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            for line in answer:
                if line.startswith(b"data: "):
                    if line.strip() == b"data: [DONE]":
                        return
                    yield json.loads(line[6:])
        raise AssertionError("the stream ended without [DONE]")


def post(url: str, body: Any, timeout: float = 120) -> tuple[int, Any]:
    """(status, body) of one request anywhere."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
