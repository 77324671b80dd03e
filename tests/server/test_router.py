"""Two replicas behind an existing router on loopback: work is spread, one is killed under load, no answer is wrong.

The router is smg; SOLITON_SMG names its executable where it is not on the path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
from collections.abc import Iterator

import pytest

from serving import Served, post

SMG = os.environ.get("SOLITON_SMG") or shutil.which("smg")
pytestmark = pytest.mark.skipif(SMG is None, reason="no router: pip install smg, or set SOLITON_SMG to its executable")
PROMPTS = ["def add(a, b):\n", "import os\n", "class Stack:\n", "x = [", "for i in range("]


def free_port() -> int:
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        return int(link.getsockname()[1])


@contextlib.contextmanager
def router(workers: list[str]) -> Iterator[str]:
    port = free_port()
    command = [str(SMG), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "power_of_two"]
    command += ["--prometheus-port", str(free_port()), "--health-check-interval-secs", "1", "--worker-urls", *workers]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert process.poll() is None, "the router ended"
            with contextlib.suppress(OSError):
                if post(url + "/v1/completions", {"model": "pebble", "prompt": "a", "max_tokens": 1})[0] == 200:
                    break
            time.sleep(0.1)
        else:
            raise AssertionError("the router never answered")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def test_spread_and_a_replica_that_dies() -> None:
    bodies = [{"model": "pebble", "prompt": p, "max_tokens": 24, "temperature": 0} for p in PROMPTS]
    with Served("--prefix-reuse", "off") as one, Served("--prefix-reuse", "off") as two:
        wanted = [one.ask("/v1/completions", body)["choices"][0]["text"] for body in bodies]
        with router([one.url, two.url]) as url:
            statuses: list[int] = []
            wrong: list[str] = []
            killed = threading.Event()

            def client(which: int) -> None:
                for i in range(8):
                    place = (which + i) % len(bodies)
                    try:
                        status, found = post(url + "/v1/completions", bodies[place])
                    except (urllib.error.URLError, ConnectionError):
                        statuses.append(0)
                        continue
                    statuses.append(status)
                    if status == 200 and found["choices"][0]["text"] != wanted[place]:
                        wrong.append(found["choices"][0]["text"])
                    if len(statuses) >= 12 and not killed.is_set():
                        killed.set()
                        two.process.kill()

            threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert killed.is_set() and not wrong
            assert len(statuses) == 32 and statuses.count(200) >= 28, statuses
            after = post(url + "/v1/completions", bodies[0])
            assert after[0] == 200 and after[1]["choices"][0]["text"] == wanted[0]
            text = one.call("/metrics")[2]
            served = next(line for line in text.splitlines() if line.startswith("sglang:num_requests_total"))
            assert 8 < float(served.split()[-1]) < 40, "the first replica got a part before, and all after"
