"""Reading a report's page: parsed without a browser, or loaded in one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

__all__ = ["BROWSER", "DrawnBar", "Page", "in_browser", "read_page"]

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--virtual-time-budget=2000",
)


@dataclass
class DrawnBar:
    """A bar as the page has it: label, kind, sum and parts."""

    label: str
    kind: str
    total: float
    parts: dict[str, float] = field(default_factory=dict)


class Page(HTMLParser):
    """What a test asks of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.bars: dict[str, list[DrawnBar]] = {}
        self.links: list[str] = []
        self.texts: list[str] = []
        self.documents: dict[str, Any] = {}
        self._section, self._json, self._kind = "", "", ""
        self._skips = False
        self.feed(html)
        self.text = re.sub(r"\s+", " ", " ".join(self.texts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.links += [given[name] for name in ("src", "href") if name in given]
        self._skips = tag in ("script", "style")
        if tag == "section":
            self._section = given.get("id", "")
        if tag == "script":
            self._json = given.get("id", self._section) if given.get("type") == "application/json" else ""
        if "data-label" in given and tag == "div":
            self._kind = given["class"].removeprefix("bar").strip()
        if "data-total" in given:
            bar = DrawnBar(given["data-of"], self._kind, float(given["data-total"]))
            self.bars.setdefault(self._section, []).append(bar)
        if "data-part" in given:
            self.bars[self._section][-1].parts[given["data-part"]] = float(given["data-value"])

    def handle_endtag(self, tag: str) -> None:
        self._skips = self._skips and tag not in ("script", "style")

    def handle_data(self, data: str) -> None:
        if self._skips and self._json:
            self.documents[self._json] = json.loads(data)
        elif not self._skips:
            self.texts.append(data)


def read_page(path: Path) -> Page:
    """Parse a page, and see that it asks for nothing outside itself."""
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert all(link.startswith("data:") for link in page.links), page.links
    assert "@import" not in html
    assert not re.search(r"url\(\s*['\"]?(https?:)?//", html)
    assert "default-src 'none'" in html  # a browser would refuse, too
    return page


def in_browser(path: Path, folder: Path, script: str, width: int = 1200) -> Any:
    """Load a page in Chromium and return what a script finds there.

    Args:
        path: The page.
        folder: For a copy of the page that has the script at its end.
        script: The body of a function that returns something that JSON holds. Errors of the page's own scripts come
            back beside it, and must be none.
        width: Of the window.
    """
    assert BROWSER is not None
    watch = (
        "<script>window.errors = []; addEventListener('error', (e) => window.errors.push(String(e.message)));</script>"
    )
    ask = f"""<script>addEventListener('load', async () => {{
        let found;
        try {{ found = await (async () => {{ {script} }})(); }}
        catch (error) {{ window.errors.push(String(error)); }}
        document.body.dataset.found = JSON.stringify({{found, errors: window.errors}});
    }});</script>"""
    html = path.read_text(encoding="utf-8").replace("<style>", watch + "<style>", 1).replace("</body>", ask + "</body>")
    copy = folder / "asked.html"
    copy.write_text(html, encoding="utf-8")
    command = [BROWSER, *_FLAGS, f"--user-data-dir={folder / 'browser'}", f"--window-size={width},900", "--dump-dom"]
    run = subprocess.run([*command, copy.as_uri()], capture_output=True, text=True, timeout=50)
    found: list[Any] = []
    _AttributeReader(found.append).feed(run.stdout)
    assert found, run.stderr[-2000:]
    assert found[0]["errors"] == []
    return found[0]["found"]


class _AttributeReader(HTMLParser):
    def __init__(self, tell: Callable[[Any], None]) -> None:
        super().__init__()
        self._tell = tell

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body" and (found := dict(attrs).get("data-found")):
            self._tell(json.loads(found))
