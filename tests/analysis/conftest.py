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


@pytest.fixture
def is_dark():
    """``is_dark(page)``: whether its paper is dark."""

    def dark(page):
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, background.strip("rgba()").split(",")[:3])) < 3 * 64

    return dark


@pytest.fixture
def weak_texts():
    """``weak_texts(page)``: the texts whose contrast with their ground is below WCAG AA's 4.5."""
    return lambda page: page.evaluate("""() => {
      const parts = (colour) => colour.match(/[\\d.]+/g).map((x) => Number(x) * (colour.startsWith('color(srgb') ? 255 : 1));
      const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
      const ground = (node) => {
        for (let at = node; at; at = at.parentElement) {
          const found = parts(getComputedStyle(at).backgroundColor);
          if (found.length < 4 || found[3] > 0) return found;
        }
      };
      const owns = (node) => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
      return [...document.querySelectorAll('body *, svg text')].filter(node => node.checkVisibility() && owns(node))
        .filter(node => !node.closest(':disabled, [aria-disabled=true], script, style')).map(node => {
          const style = getComputedStyle(node);
          const [a, b] = [light(parts(node.closest('svg') ? style.fill : style.color)), light(ground(node))];
          return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), node.outerHTML.slice(0, 120)];
        }).filter(([ratio]) => ratio < 4.5);
    }""")
