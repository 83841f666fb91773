"""A real browser (Debian's chromium, driven by playwright), and windows in it that are watched."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

from tests.waiting import PATIENCE

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
NEEDED = {"playwright": importlib.util.find_spec("playwright"), "chromium": CHROMIUM}
MISSING = [name for name, there in NEEDED.items() if not there]


@pytest.fixture(scope="module")
def browser():
    if MISSING:
        pytest.skip(f"needs {' and '.join(MISSING)} (pip install playwright; apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = {"args": ["--no-sandbox", "--disable-dev-shm-usage"], "timeout": 1000 * PATIENCE}
        browser = playwright.chromium.launch(executable_path=CHROMIUM, **options)
        yield browser
        browser.close()


@pytest.fixture
def window(browser):
    """``window(url, "#layer=1")`` opens a page; afterwards no error, no dialog and no request may have happened."""
    windows, wrong = [], []

    def open_page(url, address="", *, size=(1280, 900), **options):
        windows.append(browser.new_context(viewport={"width": size[0], "height": size[1]}, **options))
        page = windows[-1].new_page()
        page.set_default_timeout(1000 * PATIENCE)
        page.on("console", lambda message: wrong.append(message.text) if "getImageData" not in message.text else None)  # ours
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
        here = (url, "data:", "about:srcdoc")
        page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith(here) else None)
        page.goto(url + address)
        return page

    yield open_page
    for one in windows:
        one.close()
    assert wrong == []
