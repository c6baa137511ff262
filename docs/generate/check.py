"""Checks a built site: ``python -m docs.generate.check site``. Exit code 1, and a line each, for what is wrong.

Links and anchors have to lead somewhere, nothing may be fetched from elsewhere, a list may not have become text, and
the search has to know every page.
"""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"img": "src", "script": "src", "source": "srcset", "iframe": "src", "link": "href"}  # what a browser fetches
FETCHES = re.compile(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", re.IGNORECASE)  # in a style sheet


class _Page(HTMLParser):
    """What a page links to, what it loads, its anchors, and the texts of its paragraphs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.paragraphs: list[str] = []
        self._in_paragraph = self._in_code = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if LOADED.get(tag) in values and values.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(values[LOADED[tag]])
        self._in_code = self._in_code or tag == "code"
        if tag == "p":
            self._in_paragraph = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_code = self._in_code and tag != "code"
        if tag == "p":
            self._in_paragraph = False

    def handle_data(self, data: str) -> None:
        if self._in_paragraph:
            self.paragraphs[-1] += "x" if self._in_code else data


def wrong(site: Path) -> list[str]:
    """What is wrong with a site, a sentence each."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    out = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in (*page.links, *page.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    out.append(f"{name} fetches {link}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if path.name == "404.html":
                continue  # its links begin at the server's root
            if not target.is_file():
                out.append(f"{name}: {link} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                out.append(f"{name}: {link}: no such anchor")
        out += [f"{name}: a list became text: {p[:60]!r}" for p in page.paragraphs if re.search(r"\n(- |\d+\. )", p)]
    for path in site.rglob("*.css"):
        if FETCHES.search(path.read_text()):
            out.append(f"{path.relative_to(site)} fetches something from elsewhere")
    return out + _unsearchable(site, pages)


def _unsearchable(site: Path, pages: dict[Path, _Page]) -> list[str]:
    """Pages that the search does not know."""
    index = site / "search" / "search_index.json"
    if not index.is_file():
        return ["there is no search index"]
    known = {entry["location"].partition("#")[0] for entry in json.loads(index.read_text())["docs"]}
    names = {str(path.relative_to(site)) for path in pages if "<article" in path.read_text()}
    return [f"the search does not know {name}" for name in sorted(names - known - {"404.html"})]


def main(words: list[str]) -> int:
    """The command line; the one word is the site's folder."""
    if len(words) != 1 or not Path(words[0]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    found = wrong(Path(words[0]).resolve())
    for line in found:
        print(line, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
