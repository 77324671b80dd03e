"""Makes the pictures of the page in docs/, of a running server: python tools/page_pictures.py http://127.0.0.1:30000"""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))

from browser import Browser  # noqa: E402

ASKED = (
    "Write a function that adds two numbers.",
    "I need a Python function named `callable_or_raise`. It should do the following: Check that an object is "
    "callable, else raise a :exc:`TypeError`.",
)


def main(address: str) -> None:
    """docs/page-light.png, page-dark.png and page-phone.png."""
    docs = REPOSITORY / "docs"
    with Browser() as browser:
        for name, scheme, size in (
            ("light", "light", (1280, 800)), ("dark", "dark", (1280, 800)), ("phone", "light", (360, 740)),
        ):  # fmt: skip
            browser.screen(*size, phone=name == "phone")
            browser.scheme(scheme)
            browser.open(address)
            browser.value("temperature", 0)
            for count, text in enumerate(ASKED[name == "phone" :], 1):
                browser.type(text)
                browser.press("Enter")
                browser.wait(f"turns.length === {count} && turns.at(-1).over")
            browser.wait("info.internal_states[0].avg_spec_accept_length && !info.running")
            browser.js("document.activeElement.blur()")
            browser.hover(".turn:last-child .band:nth-of-type(8)")
            browser.picture(docs / f"page-{name}.png")


if __name__ == "__main__":
    main(sys.argv[1])
