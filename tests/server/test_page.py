"""The page: in a headless Chromium against the bundled model, and against a scripted server for what that model cannot
do. Without a Chromium the tests of its files remain."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from browser import Browser, needs_browser
from soliton.server.app import FILES, page

REPOSITORY = Path(__file__).resolve().parents[2]
STATIC = REPOSITORY / "src" / "soliton" / "server" / "static"
ANSWERED = "current === null && turns.at(-1)?.over"
SHORT = "Write a function that adds two numbers."
# for answers of a known length: the page has no such field
ENDLESS = """
const plain = window.fetch;
window.fetch = (path, given) => plain(path, given?.body
  ? {...given, body: JSON.stringify({...JSON.parse(given.body), ignore_eos: true})} : given);
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server of the bundled model."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("SOLITON_")}
    env["PYTHONPATH"] = str(REPOSITORY / "src")
    command = [sys.executable, "-m", "soliton", "serve", "pebble", "--port", "0"]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address, said = "", ""
        for line in process.stderr:
            said += line
            if line.startswith("http://"):
                address = line.split()[0]
            if line.startswith("ready"):
                break
        assert address and "ready" in said, said
        threading.Thread(target=process.stderr.read, daemon=True).start()  # nobody may wait for a full pipe
        yield address
        process.terminate()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def window(chromium: Browser, server: str) -> Browser:
    """The page of the bundled model, fresh, greedy and short."""
    chromium.screen(1280, 800)
    chromium.scheme("light")
    chromium.open(server)
    chromium.wait("info?.served_model_name")
    chromium.value("temperature", 0)
    chromium.value("max_tokens", 48)
    return chromium


def say(window: Browser, text: str) -> None:
    window.js("document.getElementById('input').focus()")
    window.type(text)
    window.press("Enter")


def endless(window: Browser) -> None:
    """Start an answer of thousands of tokens, and see it grow."""
    window.value("max_tokens", 4000)
    say(window, SHORT)
    window.wait("current?.steps.length > 3")


@needs_browser
class TestChat:
    def test_a_message_by_keyboard_streams_in_bands(self, window: Browser) -> None:
        assert window.js("return document.activeElement.id") == "input"  # nothing has to be clicked
        window.type(SHORT)
        window.press("Enter")
        window.wait("document.querySelectorAll('.content .band').length > 1")
        window.wait(ANSWERED)
        assert window.text(".said") == SHORT
        assert window.text(".content").startswith("def ")
        bands = window.js("return [...document.querySelectorAll('.content .band')].map(b => b.textContent)")
        assert len(bands) > 3
        assert "".join(bands) == window.js("return turns[0].content")
        assert window.count("#bars rect") == window.js("return turns[0].steps.length") > 3
        tokens = window.js("return turns[0].steps.map(step => step.tokens)")
        assert sum(tokens) == window.js("return turns[0].meta.completion_tokens")
        assert tokens[0] == 1 and max(tokens) > 1
        colours = (
            "return new Set([...document.querySelectorAll('.band')].map(b => getComputedStyle(b).backgroundColor))"
        )
        assert window.js(colours + ".size") == 2
        for figure in ("tpot", "rate", "accept", "ttft-here", "ttft-there", "tpot-here", "tpot-there", "rate-there"):
            assert re.match(r"[\d.]+", window.text(f"#{figure}")), figure
        assert window.count("#budget span") > 1
        assert window.text("#own") == "served at once"
        assert window.text("#status").startswith("Answer: def ")

    def test_a_band_tells_its_tokens_to_pointer_and_keyboard(self, window: Browser) -> None:
        say(window, SHORT)
        window.wait(ANSWERED)
        tokens = window.js("return turns[0].steps.map(step => step.tokens)")
        bands = window.js("return [...document.querySelectorAll('.band')].map(band => band.step)")
        window.hover(".band:nth-of-type(3)")
        assert window.text("#tip").startswith(f"{tokens[bands[2]]} token")
        assert window.count(".band.lit") == window.count("#bars .lit") == 1
        assert window.count(".band[tabindex='0']") == 1  # one stop for the tabulator, not hundreds
        window.js("document.querySelector('.band[tabindex]').focus()")
        assert window.text("#tip") == "1 token · with the prompt"
        window.press("ArrowRight")
        assert window.text("#tip").startswith(f"{tokens[bands[1]]} token")
        window.press("ArrowLeft")
        assert window.text("#tip") == "1 token · with the prompt"

    def test_bands_can_be_hidden(self, window: Browser) -> None:
        say(window, SHORT)
        window.wait(ANSWERED)
        window.click("#bands")
        colour = window.js("return getComputedStyle(document.querySelector('.band')).backgroundColor")
        assert colour == "rgba(0, 0, 0, 0)"
        window.hover(".band:nth-of-type(3)")
        assert window.text("#tip") == "" and window.count(".band[tabindex='0']") == 0

    @pytest.mark.parametrize("how", ["button", "key"])
    def test_a_long_stream_is_stopped_and_the_next_one_answered(self, window: Browser, how: str) -> None:
        window.js(ENDLESS)
        endless(window)
        window.press("Escape") if how == "key" else window.click("#stop")
        window.wait(ANSWERED, 5)
        assert window.js("return document.activeElement.id") == ("input" if how == "key" else "send")
        assert "stopped" in window.text(".facts")
        assert window.js("return turns[0].tokens") < 4000
        window.wait("info && !info.running", 10)  # the server has let go
        window.value("max_tokens", 24)
        say(window, "And now?")
        window.wait(f"turns.length === 2 && {ANSWERED}")
        assert window.js("return turns[1].state") == "done"

    def test_an_error_is_read_and_mended(self, window: Browser) -> None:
        window.value("max_tokens", 999999)
        say(window, SHORT)
        window.wait(ANSWERED)
        assert "max_tokens is 999999, but the context has room for" in window.text(".fault")
        assert window.js("return document.querySelector('.fault').getAttribute('role')") == "alert"
        window.value("max_tokens", 24)
        window.click(".again")
        window.wait(ANSWERED)
        assert window.count(".turn") == 1 and window.text(".fault") == ""
        assert window.text(".content").startswith("def ")

    def test_keys(self, window: Browser) -> None:
        say(window, SHORT)
        window.wait(ANSWERED)
        window.js("document.activeElement.blur()")
        window.press("/")
        assert window.js("return document.activeElement.id") == "input"
        window.type("a")
        window.press("Shift", "Enter")
        window.type("/")
        assert window.js("return document.getElementById('input').value") == "a\n/"
        window.press("Control", "k")
        assert window.count(".turn") == 0 and window.js("return turns.length") == 0

    def test_a_new_chat_ends_the_answer_in_progress(self, window: Browser) -> None:
        window.js(ENDLESS)
        endless(window)
        window.press("Control", "k")
        window.wait("current === null && info && !info.running", 10)
        assert window.count(".turn") == 0
        window.value("max_tokens", 8)
        say(window, SHORT)
        window.wait(ANSWERED)

    def test_whoever_waits_sees_the_line(self, window: Browser) -> None:
        # another client is answered; it lets go when it has seen enough
        other = """
        window.other = new AbortController();
        fetch('/v1/completions', {method: 'POST', signal: other.signal, headers: {'Content-Type': 'application/json'},
          body: JSON.stringify({prompt: 'a', max_tokens: 4000, ignore_eos: true})}).catch(() => 0);
        """
        window.js(other)
        window.wait("info?.running", 10)
        say(window, SHORT)
        window.wait("document.getElementById('state').textContent.startsWith('waiting, 1 in line')", 10)
        window.js("other.abort()")
        window.wait(ANSWERED)
        assert re.fullmatch(r"1 in front, waited [\d.]+ m?s", window.text("#own"))


@needs_browser
class TestLook:
    def test_nothing_is_asked_of_anybody_else(self, window: Browser, server: str) -> None:
        say(window, SHORT)
        window.wait(ANSWERED)
        asked = {address.removeprefix(server) for address in window.requests()}
        static = {f"/static/{name}" for name in FILES if name != "index.html"}
        assert asked == {"/", "/v1/chat/completions", "/server_info"} | static
        said = [entry["message"] for entry in window.log("browser")]
        assert said == []  # a breach of the content security policy would be here

    def test_a_phone_needs_no_scrolling_sideways(self, window: Browser) -> None:
        window.screen(360, 740, phone=True)
        narrow = "return document.documentElement.scrollWidth <= 360"
        assert window.js(narrow)
        say(window, "long" * 50)
        window.wait(ANSWERED)
        assert window.js(narrow)
        window.js("for (const part of document.querySelectorAll('main details')) part.open = true")
        assert window.js(narrow)
        for selector in ("#log", "#live", "#settings"):
            assert window.js(
                "const n = document.querySelector(arguments[0]); return n.scrollWidth <= n.clientWidth", selector
            )

    def test_dark_differs_and_can_be_chosen(self, window: Browser) -> None:
        paper = "return getComputedStyle(document.documentElement).backgroundColor"
        light = window.js(paper)
        window.scheme("dark")
        dark = window.js(paper)
        assert dark != light
        window.click("#theme")
        assert window.js(paper) == light and window.text("#theme") == "Theme: light"
        window.click("#theme")
        window.scheme("light")
        assert window.js(paper) == dark and window.text("#theme") == "Theme: dark"

    def test_the_card_tells_the_model_and_its_decisions(self, window: Browser) -> None:
        card = window.text("#card")
        for part in ("pebble", "cpu", "float32", "4,096 tokens", "nextn"):
            assert part in card
        window.click("#live details summary")
        assert "pebble has an MTP layer" in window.text("#decisions")


class Script:
    """A server that answers as told. keys and bodies: what came; chunks: the deltas of each step, and its tokens;
    cut: whether the stream breaks off."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        self.bodies: list[dict[str, Any]] = []
        self.key: str | None = None
        self.cut = False
        self.chunks: list[tuple[list[dict[str, Any]], int]] = []
        self.address = ""
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)

    def _run(self, started: threading.Event) -> None:
        async def start() -> None:
            app = web.Application()
            app.add_routes([web.get("/", page), web.get("/static/{name}", page), web.get("/server_info", self._info)])
            app.add_routes([web.post("/v1/chat/completions", self._chat)])
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.address = site.name.rsplit(":", 1)[0] + f":{runner.addresses[0][1]}"
            started.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _refused(self, request: web.Request) -> web.Response | None:
        self.keys.append(request.headers.get("Authorization"))
        if self.key is None or self.keys[-1] == f"Bearer {self.key}":
            return None
        return web.json_response({"error": {"message": "the API key is missing or wrong"}}, status=401)

    async def _info(self, request: web.Request) -> web.Response:
        info = {
            "served_model_name": "script", "device": "none", "dtype": "none", "max_context": 9, "speculation": "off",
            "run_ahead": 0, "running": False, "queued": 0, "decisions": ["a = b: because: c"],
            "internal_states": [{"avg_spec_accept_length": None}],
        }  # fmt: skip
        return self._refused(request) or web.json_response(info)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if refused := self._refused(request):
            return refused
        self.bodies.append(await request.json())
        response = web.StreamResponse(headers={"X-Queue-Position": "2", "X-Queue-Wait-Ms": "1234.5"})
        await response.prepare(request)
        done, data = 0, ""
        for deltas, tokens in self.chunks:
            done += tokens
            for i, delta in enumerate(deltas):
                choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
                if i == len(deltas) - 1:
                    choice["meta_info"] = {"completion_tokens": done}
                data += f"data: {json.dumps({'choices': [choice]})}\n\n"
        if not self.cut:
            last = {"index": 0, "delta": {}, "finish_reason": "stop", "meta_info": {"completion_tokens": done}}
            data += f"data: {json.dumps({'choices': [last]})}\n\ndata: [DONE]\n\n"
        for at in range(0, len(raw := data.encode()), 50):  # as a network may cut it: anywhere
            await response.write(raw[at : at + 50])
        return response


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    script.close()


@pytest.fixture
def scripted(chromium: Browser, script: Script) -> Browser:
    chromium.screen(1280, 800)
    chromium.open(script.address)
    chromium.wait("info?.served_model_name")
    return chromium


def call(index: int, name: str | None, arguments: str) -> dict[str, Any]:
    said = {"arguments": arguments} | ({"name": name} if name else {})
    return {"tool_calls": [{"index": index, "function": said} | ({"id": f"call-{index}"} if name else {})]}


@needs_browser
class TestScripted:
    def test_reasoning_and_calls_have_their_places(self, scripted: Browser, script: Script) -> None:
        script.chunks = [
            ([{"reasoning_content": "I <b>think</b>"}], 1),
            ([{"reasoning_content": "."}, {"content": "So é"}], 3),
            ([{"content": ":"}, call(0, "look", "")], 2),
            ([call(0, None, '{"at": ')], 4),
            ([call(0, None, "1}"), call(1, "wait", "{}")], 2),
        ]
        say(scripted, "hello")
        scripted.wait(ANSWERED)
        assert scripted.js("return document.querySelector('.reasoning').open") is False  # the answer has begun
        assert scripted.js("return document.querySelector('.reasoning .text').textContent") == "I <b>think</b>."
        assert scripted.text(".content") == "So é:"
        assert scripted.text(".call") == 'Call of look\n{"at": 1}'
        assert scripted.text(".call:nth-child(2)") == "Call of wait\n{}"
        # step 1 has a band in the reasoning and one in the content, of one colour
        steps = scripted.js("return [...document.querySelectorAll('.band')].map(band => band.step)")
        assert steps == [0, 1, 1, 2, 3, 4, 4]
        assert scripted.js("return turns[0].steps.map(step => step.tokens)") == [1, 3, 2, 4, 2]
        assert scripted.text("#accept") == "2.75"
        assert scripted.text("#own") == "2 in front, waited 1235 ms"
        assert scripted.text(".facts").startswith("12 tokens")

    def test_what_is_sent(self, scripted: Browser, script: Script) -> None:
        script.chunks = [([{"reasoning_content": "hm"}, {"content": "one"}, call(0, "look", "")], 1)]
        tools = [{"type": "function", "function": {"name": "look"}}]
        fields = {"system": "Be short.", "seed": 7, "temperature": 0.5, "max_tokens": "", "thinking": "on"}
        for name, value in {**fields, "tools": json.dumps(tools)}.items():
            scripted.value(name, value)
        assert scripted.text("#changed") == "system, temperature, max tokens, thinking, seed, tools"
        say(scripted, "first")
        scripted.wait(ANSWERED)
        say(scripted, "second")
        scripted.wait(f"turns.length === 2 && {ANSWERED}")
        first, second = script.bodies
        assert first == {
            "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "first"}],
            "stream": True, "return_meta_info": True, "stream_options": {"include_usage": True}, "seed": 7,
            "temperature": 0.5, "chat_template_kwargs": {"enable_thinking": True}, "tools": tools,
        }  # fmt: skip
        called = {"id": "call-0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        assert {*script.keys} == {None}
        said = {"role": "assistant", "content": "one", "reasoning_content": "hm", "tool_calls": [called]}
        assert second["messages"] == [*first["messages"], said, {"role": "user", "content": "second"}]

    def test_tools_that_are_no_json_are_not_sent(self, scripted: Browser, script: Script) -> None:
        scripted.value("tools", "[")
        say(scripted, "hello")
        scripted.wait(ANSWERED)
        assert scripted.text(".fault").startswith("Tools is not JSON")
        assert script.bodies == []

    def test_a_stream_that_breaks_off_is_told_and_leaves_the_history_alone(
        self, scripted: Browser, script: Script
    ) -> None:
        script.cut = True
        say(scripted, "lost")
        scripted.wait(ANSWERED)
        assert scripted.text(".fault") == "The stream broke off before the answer had ended."
        script.cut, script.chunks = False, [([{"content": "yes"}], 1)]
        say(scripted, "again")
        scripted.wait(f"turns.length === 2 && {ANSWERED}")
        assert script.bodies[1]["messages"] == [{"role": "user", "content": "again"}]

    def test_a_key_is_asked_for_and_kept_for_the_tab_only(self, chromium: Browser, script: Script) -> None:
        script.key, script.chunks = "swordfish", [([{"content": "yes"}], 1)]
        chromium.open(script.address)
        for attempt in ("guess", "swordfish"):
            chromium.wait("document.getElementById('key').open")
            chromium.type(attempt)
            chromium.press("Enter")
        chromium.wait("info?.served_model_name")
        say(chromium, "hello")
        chromium.wait(ANSWERED)
        assert chromium.text(".content") == "yes"
        assert [*dict.fromkeys(script.keys)] == [None, "Bearer guess", "Bearer swordfish"]
        stored = chromium.js("return [sessionStorage.apiKey, JSON.stringify(localStorage), document.cookie]")
        assert stored[0] == "swordfish" and "swordfish" not in "".join(stored[1:])

    def test_without_a_key_the_refusal_is_read_and_the_next_try_asks_again(
        self, chromium: Browser, script: Script
    ) -> None:
        script.key, script.chunks = "swordfish", [([{"content": "yes"}], 1)]
        chromium.open(script.address)
        chromium.wait("document.getElementById('key').open")
        chromium.press("Escape")
        chromium.wait("document.getElementById('state').textContent === 'key needed'")
        say(chromium, "hello")
        chromium.wait("document.getElementById('key').open")
        chromium.click("#key-cancel")
        chromium.wait(ANSWERED)
        assert chromium.text(".fault") == "the API key is missing or wrong"
        chromium.click(".again")
        chromium.wait("document.getElementById('key').open")
        chromium.type("swordfish")
        chromium.press("Enter")
        chromium.wait(ANSWERED)
        assert chromium.text(".content") == "yes"


class TestFiles:
    def test_every_file_is_served_with_a_strict_policy(self, script: Script) -> None:
        async def ask() -> None:
            async with ClientSession(script.address) as session:
                for name in ("", *(f"static/{file}" for file in FILES)):
                    async with session.get(f"/{name}") as response:
                        assert response.status == 200
                        policy = response.headers["Content-Security-Policy"]
                        assert "default-src 'self'" in policy and "unsafe" not in policy
                for name in ("static/", "static/app.py", "static/%2e%2e%2fapp.py", "static/../app.py"):
                    async with session.get(f"/{name}") as response:
                        assert response.status == 404

        asyncio.run(ask())

    def test_no_file_names_anybody_else(self) -> None:
        assert sorted(FILES) == sorted(path.name for path in STATIC.iterdir())
        for name in FILES:
            text = (STATIC / name).read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
            assert re.findall(r"(?:https?:|wss?:)?//[\w.-]+\.\w+|@import|url\(", text) == [], name
            assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\b|\bon\w+=\"", text), name

    def test_the_page_has_no_script_or_style_inside(self) -> None:
        text = (STATIC / "index.html").read_text(encoding="utf-8")
        assert re.findall(r"<script[^>]*>", text) == ['<script src="/static/app.js" defer>']
        assert not re.search(r"<style|\sstyle=", text)

    def test_stays_small(self) -> None:
        assert sum(len((STATIC / name).read_text(encoding="utf-8").splitlines()) for name in FILES) < 900

    def test_the_wheel_holds_it(self) -> None:
        builders = pytest.importorskip("hatchling.builders.wheel")
        config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
        assert config["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/soliton"]}
        builder = builders.WheelBuilder(str(REPOSITORY))
        packed = {file.distribution_path for file in builder.recurse_included_files()}
        assert {f"soliton/server/static/{name}" for name in FILES} <= packed
