"""Clients that leave, stall, flood or send rubbish: the stream in progress keeps its text, and so do all others."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from serving import Served

ADD = "def add(a, b):\n"
PROMPTS = [ADD, "import os\n\n\ndef remove(path):\n", "class Stack:\n", 'def test_add():\n    """', "x = ["]


def body(i: int, tokens: int = 16) -> dict[str, Any]:
    """Of request ``i``: greedy and sampled ones in turns."""
    given: dict[str, Any] = {"prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": tokens, "temperature": 0}
    return given if i % 2 else {**given, "temperature": 0.9, "seed": i % 11}


def socket_to(served: Served) -> socket.socket:
    parts = urlsplit(served.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def request_bytes(data: bytes, length: int | None = None) -> bytes:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data) if length is None else length}\r\n\r\n"
    )
    return head.encode() + data


@pytest.mark.parametrize("count", [24, pytest.param(500, marks=pytest.mark.full)])
def test_random_aborts(served: Served, count: int) -> None:
    """Half of the requests are cancelled at a random moment, waiting or running; every other text is what the same
    request gives alone on a fresh engine."""
    rng = random.Random(count)
    kinds = [rng.choice(("stay", "leave", "leave streaming", "stay")) for _ in range(count)]
    texts: dict[int, str] = {}

    async def one(session: aiohttp.ClientSession, gate: asyncio.Semaphore, i: int) -> None:
        async with gate:
            given = body(i)
            try:
                async with asyncio.timeout(None if kinds[i] == "stay" else rng.uniform(0.001, 0.5)):
                    if kinds[i] == "leave streaming":
                        given["stream"] = True
                    async with session.post(served.url + "/v1/completions", json=given) as answer:
                        assert answer.status == 200
                        if "stream" in given:
                            async for _ in answer.content:
                                pass
                        else:
                            texts[i] = (await answer.json())["choices"][0]["text"]
            except TimeoutError:
                assert kinds[i] != "stay"

    async def every() -> None:
        gate = asyncio.Semaphore(24)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(one(session, gate, i) for i in range(count)))

    asyncio.run(every())
    assert set(texts) >= {i for i in range(count) if kinds[i] == "stay"}
    alone: dict[str, str] = {}
    with Served("--prefix-reuse", "off") as fresh:
        for i, text in texts.items():
            key = json.dumps(body(i))
            if key not in alone:
                alone[key] = fresh.ask("/v1/completions", body(i))["choices"][0]["text"]
            assert text == alone[key], i


def test_a_stream_amid_the_worst(served: Served) -> None:
    """Fuzz, huge and half-sent bodies, slow and half-closed sockets and 200 connections, while one answer streams."""
    given = {"prompt": ADD, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    wanted = served.ask("/v1/completions", given)["choices"][0]["text"]
    stop, faults = threading.Event(), []

    def storm() -> None:
        rng, held = random.Random(1), []
        try:
            held = [socket_to(served) for _ in range(200)]
            for i, link in enumerate(held[:100]):
                link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConte"[: i + 1])  # never goes on
            for link in held[100:120]:
                link.sendall(request_bytes(b'{"prompt": "a"', length=1000))
                link.shutdown(socket.SHUT_WR)
            while not stop.is_set():
                with socket_to(served) as link:
                    raw = rng.randbytes(rng.randrange(1, 400))
                    link.sendall(rng.choice((raw, request_bytes(raw), request_bytes(b"[" * 50_000), raw + b"\r\n\r\n")))
                    link.recv(64)
                status = served.call("/v1/completions", {"prompt": "a", "max_tokens": "x"})[0]
                if status != 400:
                    faults.append(status)
        except ConnectionError:
            pass  # refused or dropped: its right
        except Exception as error:
            faults.append(error)
        finally:
            for link in held:
                link.close()

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        text = "".join(c["text"] for event in served.events("/v1/completions", given) for c in event["choices"])
    finally:
        stop.set()
        thread.join()
    assert text == wanted and not faults
    status, _, found = served.call("/v1/completions", raw=b" " * (5 << 20), method="POST")
    assert status == 413, found
    assert served.ask("/v1/completions", given)["choices"][0]["text"] == wanted


def test_a_client_that_does_not_read(served: Served) -> None:
    """Its answer is made and waits in the server; the next one's turn comes meanwhile."""
    link = socket_to(served)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    data = json.dumps({"prompt": ADD, "max_tokens": 1500, "ignore_eos": True, "stream": True, "logprobs": 5}).encode()
    link.sendall(request_bytes(data))
    assert link.recv(12) == b"HTTP/1.1 200"
    assert served.ask("/v1/completions", body(1))["choices"][0]["text"]
    link.close()


def test_the_line_is_bounded_and_seen() -> None:
    with Served("--max-queued-requests", "2") as small:
        long = {"text": ADD, "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}

        async def crowd() -> None:
            async with aiohttp.ClientSession() as session:
                async with session.post(small.url + "/generate", json={**long, "stream": True}) as first:
                    await first.content.readline()
                    waiting = [
                        asyncio.create_task(session.post(small.url + "/v1/completions", json=body(i))) for i in range(2)
                    ]
                    while (await (await session.get(small.url + "/get_load")).json())[0]["num_waiting_reqs"] < 2:
                        await asyncio.sleep(0.01)
                    async with session.post(small.url + "/v1/completions", json=body(0)) as refused:
                        assert refused.status == 429 and refused.headers["Retry-After"]
                        assert (await refused.json())["error"]["code"] == "queue_full"
                    text = await (await session.get(small.url + "/metrics")).text()
                    assert 'num_queue_reqs{model_name="pebble"} 2.0' in text
                answers = await asyncio.gather(*waiting)  # the first one has left
                assert [answer.headers["X-Queue-Position"] for answer in answers] == ["1", "2"]
                assert all(float(answer.headers["X-Queue-Wait-Ms"]) > 0 for answer in answers)
                assert all(answer.status == 200 for answer in answers)

        asyncio.run(crowd())


def test_a_deadline() -> None:
    with Served("--request-timeout", "0.6") as strict:
        long = {"prompt": ADD, "max_tokens": 3000, "ignore_eos": True}
        status, _, found = strict.call("/v1/completions", long)
        assert status == 504 and found["error"]["code"] == "deadline_exceeded"
        events = list(strict.events("/v1/completions", long))
        assert events[0]["choices"] and events[-1]["error"]["code"] == "deadline_exceeded"
        assert strict.ask("/v1/completions", body(1, 4))["choices"][0]["text"]


def test_what_nobody_waits_for_reaches_nobody_else(served: Served) -> None:
    """Clients that leave while prefix checkpoints are forgotten, and aborts between the answers of one request."""
    wanted = served.ask("/v1/completions", body(1))["choices"][0]["text"]
    for _ in range(20):
        link = socket_to(served)
        link.sendall(b"POST /flush_cache HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        link.close()
        assert served.ask("/v1/completions", body(1))["choices"][0]["text"] == wanted
    for i in range(12):
        many = {"text": ADD, "rid": f"many{i}", "sampling_params": {"max_new_tokens": 1, "n": 100}}
        found: list[Any] = []
        thread = threading.Thread(target=lambda given=many, found=found: found.append(served.call("/generate", given)))
        thread.start()
        while not served.ask("/abort_request", {"rid": f"many{i}"})["aborted"]:
            pass
        thread.join()
        status, _, answers = found[0]
        ends = ["abort"] if status == 409 else [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
        assert ends[-1] == "abort" and len(ends) in (1, 100), "an abort that was counted ends the request"


def test_answers_that_are_cut_say_so() -> None:
    given = {"prompt": ADD, "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
    with Served("--drain-timeout", "0.3") as ending:
        events = ending.events("/v1/completions", given)
        next(events)
        waiting: list[Any] = []
        thread = threading.Thread(target=lambda: waiting.append(ending.call("/v1/completions", given)))
        thread.start()
        while ending.ask("/get_load", None)[0]["num_waiting_reqs"] < 1:
            pass
        ending.process.send_signal(signal.SIGTERM)
        last = list(events)[-1]
        assert last["error"]["code"] == "draining"
        thread.join()
        assert waiting[0][0] == 503 and waiting[0][2]["error"]["code"] == "draining"
        assert ending.process.wait(30) == 0


def engine_of(served: Served) -> int:
    children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
    return int(next(pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()))


def test_an_engine_that_hangs_holds_nobody() -> None:
    """Whoever waits hears of the deadline, and SIGTERM ends the server, though the engine never ends its step."""
    given = {"prompt": ADD, "max_tokens": 3000, "ignore_eos": True}
    with Served("--request-timeout", "1", "--drain-timeout", "1") as stuck:
        events = stuck.events("/v1/completions", given)
        next(events)
        os.kill(engine_of(stuck), signal.SIGSTOP)
        assert list(events)[-1]["error"]["code"] == "deadline_exceeded"
        status, _, found = stuck.call("/v1/completions", given)
        assert (status, found["error"]["code"]) == (504, "deadline_exceeded")
        stuck.process.send_signal(signal.SIGTERM)
        assert stuck.process.wait(40) == 0
    assert "Traceback" not in "".join(stuck.said)


def test_a_client_that_leaves_is_no_fault() -> None:
    with Served("--log-requests") as logging:
        for _ in range(20):
            link = socket_to(logging)
            text = json.dumps({"prompt": ADD, "max_tokens": 60, "ignore_eos": True, "stream": True}).encode()
            link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
            link.recv(100)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            link.close()
        assert logging.ask("/v1/completions", body(1))["choices"][0]["text"]
    said = "".join(logging.said)
    assert "Traceback" not in said and " 500 " not in said and said.count(" 499 ") >= 10


def test_a_long_text_stops_nobody(served: Served) -> None:
    """Cutting it into tokens takes a second, in which the event loop runs on."""
    text, worst = "hello world " * 300_000, 0.0
    for path, given in (("/tokenize", {"prompt": text}), ("/v1/completions", {"prompt": text})):
        thread = threading.Thread(target=served.call, args=(path, given))
        thread.start()
        while thread.is_alive():
            at = time.perf_counter()
            served.call("/ping")
            worst = max(worst, time.perf_counter() - at)
    assert worst < 0.8


def test_sigterm_lets_answers_end_and_refuses_new_ones() -> None:
    with Served() as ending:
        given = {"prompt": ADD, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
        events = ending.events("/v1/completions", given)
        next(events)
        ending.process.send_signal(signal.SIGTERM)
        while ending.call("/health")[0] == 200:
            pass
        assert ending.call("/health_generate")[0] == 503
        assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
        assert ending.process.wait(30) == 0


def test_health_while_loading_and_after_the_engine_s_death() -> None:
    with Served(ready=False) as young:
        status, headers, found = young.call("/v1/completions", {"prompt": "a"})
        if status != 200:  # it was quick
            assert (status, found["error"]["code"], headers["Retry-After"]) == (503, "loading", "1")
        young._line("ready:")
        assert young.call("/health")[0] == 200
        os.kill(engine_of(young), signal.SIGKILL)
        assert young.process.wait(30) == 1
    assert "the engine's process has ended" in "".join(young.said)
