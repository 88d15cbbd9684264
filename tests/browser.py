"""Pages read as text, and opened in a browser without a network."""

from __future__ import annotations

import html as escaping
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)> & $\\frac{1}{2}$ \"'"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Tags and attributes of a page, and whether elements close in order."""

    VOID = frozenset({"meta", "link", "img", "br", "use", "path", "rect", "image", "input", "wbr"})

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags = []
        self.attributes = []
        self.ids = []
        self.open = []
        self.words = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "wbr" and self.words:  # where a long word may be broken
            self.words[-1] += data
        elif not self.open or self.open[-1] not in {"script", "style"}:
            self.words.append(data)


# What opens the page, with nothing that asks the network.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=3000",
]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the report with")


def opened(text, tmp_path, script=""):
    """(document after its scripts ran, what the console said)."""
    path = tmp_path / "report.html"
    path.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def width_on_a_phone(page, tmp_path):
    """How wide a page is in a window of 390 pixels."""
    return int(_on_a_phone(page, tmp_path, "root.scrollWidth"))


OFF_SCREEN = "[...{root}.querySelectorAll('.scroll:not(.wide)')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
"""How many tables and pictures must be moved to be seen; a wide table has more columns than a phone has room for."""


def off_screen_on_a_phone(page, tmp_path):
    """How many of a page's tables and pictures are wider than a window of 390 pixels and must be moved to be seen."""
    return int(_on_a_phone(page, tmp_path, OFF_SCREEN.format(root="root")))


def _on_a_phone(page, tmp_path, value):
    """A value of the document's ``root`` in a window of 390 pixels.

    The frame has the document's own origin, so its width is read when it has loaded, which the document's own
    loading waits for. A message from a frame of another origin may come after the document was written out.
    """
    read = f"const root = this.contentDocument.documentElement; document.body.dataset.read = {value}"
    frame = f'<iframe width=390 height=800 onload="{read}" srcdoc="{escaping.escape(page)}"></iframe>'
    document, _ = opened(f"<!doctype html><body>{frame}</body>", tmp_path)
    return re.search(r'data-read="(\d+)"', document).group(1)
