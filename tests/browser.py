"""A headless Chromium over plain WebDriver: what the tests of the page and its pictures need of a browser."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
KEYS = {
    "Enter": "\ue007", "Shift": "\ue008", "Control": "\ue009", "Escape": "\ue00c", "Tab": "\ue004",
    "ArrowLeft": "\ue012", "ArrowRight": "\ue014",
}  # fmt: skip
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ABSENT = "no chromium and chromedriver on PATH: the page is NOT TESTED; apt-get install chromium chromium-driver"
needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=ABSENT)


class Browser:
    """One window. Close it, or use it in a with."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="soliton-browser-", ignore_cleanup_errors=True)
        command = [str(DRIVER), "--port=0"]
        self._driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._session = ""
        try:
            assert self._driver.stdout is not None
            port = next(m[1] for line in self._driver.stdout if (m := re.search(r"successfully on port (\d+)", line)))
            self._address = f"http://127.0.0.1:{port}/session"
            options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={self._home.name}"]}
            asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"}}
            self._session = "/" + self._ask("", {"capabilities": {"alwaysMatch": asked}})["sessionId"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and its driver."""
        if self._session:
            self._ask("", method="DELETE")
        self._driver.terminate()
        self._driver.wait(10)
        self._home.cleanup()

    def _ask(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + self._session + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            said = json.load(error)["value"]
            raise AssertionError(f"{said['error']}: {said['message']}") from None

    def devtools(self, command: str, **params: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._ask("/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, address: str) -> None:
        """Go there, with nothing stored of earlier visits."""
        self.log("performance"), self.log("browser")
        self._ask("/url", {"url": address})
        self.js("sessionStorage.clear(); localStorage.clear()")
        self._ask("/refresh", {})

    def js(self, script: str, *args: Any) -> Any:
        """What a function body returns in the page."""
        return self._ask("/execute/sync", {"script": script, "args": list(args)})

    def wait(self, expression: str, seconds: float = 60.0) -> Any:
        """Until an expression is true; its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.js(f"return {expression}"):
                return value
            time.sleep(0.05)
        raise AssertionError(f"not in {seconds:g} s: {expression}; the page says {self.text('body')[-800:]!r}")

    def text(self, selector: str) -> str:
        """The visible text of the first node."""
        return self.js("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def count(self, selector: str) -> int:
        """How many nodes there are."""
        return self.js("return document.querySelectorAll(arguments[0]).length", selector)

    def value(self, name: str, value: object) -> None:
        """Fill the field with this id, as if typed."""
        script = "const f = document.getElementById(arguments[0]); f.value = arguments[1];"
        self.js(script + "f.dispatchEvent(new Event('input', {bubbles: true}))", name, str(value))

    def click(self, selector: str) -> None:
        """With the pointer: what is covered or not in view cannot be clicked."""
        found = self._ask("/element", {"using": "css selector", "value": selector})
        self._ask(f"/element/{next(iter(found.values()))}/click", {})

    def hover(self, selector: str) -> None:
        """Put the pointer on the first node."""
        found = self._ask("/element", {"using": "css selector", "value": selector})
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": found}
        self._ask("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def type(self, text: str) -> None:
        """On the keyboard, to whatever has the focus."""
        self._keys([(kind, key) for key in text for kind in ("keyDown", "keyUp")])

    def press(self, *names: str) -> None:
        """Keys together, by name."""
        keys = [KEYS.get(name, name) for name in names]
        self._keys([("keyDown", key) for key in keys] + [("keyUp", key) for key in reversed(keys)])

    def _keys(self, strokes: list[tuple[str, str]]) -> None:
        actions = [{"type": kind, "value": key} for kind, key in strokes]
        self._ask("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def screen(self, width: int, height: int, *, phone: bool = False) -> None:
        """The size of the page."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1.5 if phone else 1, "mobile": phone}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)

    def scheme(self, name: str) -> None:
        """light or dark, as the system would say."""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What was logged since it was last asked for: "performance" (DevTools events) or "browser" (the console)."""
        return self._ask("/se/log", {"type": kind})

    def requests(self) -> list[str]:
        """Addresses that were asked for since ``open``."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def picture(self, path: Path) -> None:
        """What is to be seen, as PNG."""
        path.write_bytes(base64.b64decode(self._ask("/screenshot")))
