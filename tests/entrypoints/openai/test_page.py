"""The page at /, in headless Chromium, on the bundled model. Takes the pictures in docs/ when VLLM_PICTURES is set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.entrypoints.openai.browser import Browser, find_chromium
from tests.entrypoints.openai.server import Server

DOCS = Path(__file__).resolve().parents[3] / "docs" / "images"
CONTROL = 2


def test_policy_and_files(server: Server) -> None:
    page = server.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    for word in ("http://", "https://", "style=", "onclick", "<script>"):
        assert word not in page.text
    for name, kind in (("app.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")):
        file = server.client.get(f"/page/{name}")
        assert file.headers["content-type"].startswith(kind)
        assert "https://" not in file.text


@pytest.fixture(scope="module")
def bundled() -> Iterator[Server]:
    own = Server("--host", "127.0.0.1", "--port", "0", "--max-model-len", "1024", "--num-threads", "2")
    yield own
    own.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium on this machine")
    own = Browser(program)
    yield own
    own.close()


def picture(browser: Browser, name: str, tmp_path: Path) -> None:
    folder = DOCS if os.environ.get("VLLM_PICTURES") else tmp_path
    folder.mkdir(exist_ok=True)
    browser.picture(folder / name)
    assert (folder / name).stat().st_size > 10_000


DONE = "document.getElementById('stop').disabled && document.querySelectorAll('.answer').length > 0"


def open_page(server: Server, browser: Browser) -> None:
    browser.size(1280, 900)
    browser.open(server.url + "/")
    browser.wait("document.getElementById('model')?.textContent.includes('smollm2')")


def answers(server: Server, browser: Browser, tokens: int = 12) -> None:
    """Open the page, and have answers on it."""
    open_page(server, browser)
    browser.run("document.getElementById('seed').value = '1'")
    browser.run(f"document.getElementById('max-tokens').value = '{tokens}'")
    browser.run("document.getElementById('prompt').focus()")
    browser.press("Enter", 13, modifiers=CONTROL)
    browser.wait("document.querySelectorAll('.answer .token').length > 8")
    browser.wait(DONE, 60)


def test_answers_side_by_side(bundled: Server, browser: Browser, tmp_path: Path) -> None:
    answers(bundled, browser, 48)
    assert browser.run("document.querySelectorAll('.answer').length") == 4
    texts = browser.run("[...document.querySelectorAll('.answer .text')].map(e => e.textContent)")
    body = {"messages": [{"role": "user", "content": browser.run("document.getElementById('prompt').value")}]}
    answer = bundled.ok("/v1/chat/completions", body | {"n": 4, "temperature": 0.8, "max_tokens": 48, "seed": 1})
    assert texts == [choice["message"]["content"] for choice in answer["choices"]]
    status = browser.run("document.getElementById('status').textContent")
    assert "tokens/s" in status
    assert "first token after" in status
    assert browser.run("document.querySelectorAll('.answer .p0, .answer .p1, .answer .p2').length") > 0

    browser.hover("document.querySelectorAll('.answer .token')[3]")
    browser.wait("!document.getElementById('tip').hidden")
    assert browser.run("document.getElementById('tip').textContent").count("%") >= 5
    picture(browser, "page.png", tmp_path)


def test_by_keyboard(bundled: Server, browser: Browser) -> None:
    answers(bundled, browser)
    browser.run("document.querySelector('.answer').focus()")
    for _ in range(3):
        browser.press("ArrowRight", 39)
    assert browser.run("[...document.querySelector('.answer .text').children].findIndex(e => e.matches('.here'))") == 2
    assert not browser.run("document.getElementById('tip').hidden")
    browser.press("Escape", 27)
    assert browser.run("document.getElementById('tip').hidden")
    browser.run("document.getElementById('n').focus()")
    browser.press("ArrowRight", 39)
    assert browser.run("document.getElementById('n-shown').textContent") == "5"


def test_dark_and_on_a_phone(bundled: Server, browser: Browser, tmp_path: Path) -> None:
    answers(bundled, browser, 48)
    light = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.size(1280, 900, dark=True)
    assert browser.run("getComputedStyle(document.body).backgroundColor") != light
    picture(browser, "page-dark.png", tmp_path)
    browser.size(390, 844, mobile=True)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    columns = browser.run("getComputedStyle(document.getElementById('answers')).gridTemplateColumns.split(' ').length")
    assert columns == 1
    picture(browser, "page-phone.png", tmp_path)
    browser.size(1280, 900)


def test_stop_text_mode_and_errors(bundled: Server, browser: Browser) -> None:
    open_page(bundled, browser)
    browser.run("document.getElementById('max-tokens').value = '900'")
    browser.run("document.getElementById('mode').value = 'text'")
    browser.run("document.getElementById('prompt').value = 'Once upon a time, there was'")
    browser.run("document.getElementById('go').click()")
    browser.wait("document.querySelectorAll('.answer .token').length > 5")
    browser.press("Escape", 27)
    browser.wait(DONE)
    assert "stopped" in browser.run("document.getElementById('status').textContent")
    bundled.wait_idle(5)
    browser.run("document.getElementById('prompt').value = ''")
    browser.run("document.getElementById('go').click()")
    browser.wait("document.getElementById('status').classList.contains('bad')")
    assert "prompt" in browser.run("document.getElementById('status').textContent")


def test_nothing_from_outside_and_no_complaints(bundled: Server, browser: Browser) -> None:
    answers(bundled, browser)
    outside = [url for url in browser.requested() if not url.startswith((bundled.url, "about:"))]
    assert outside == []
    complaints = [text for text in browser.complaints() if "400 (Bad Request)" not in text]
    assert complaints == []
