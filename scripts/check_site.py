"""Checks a built site:  python scripts/check_site.py build/site

Every link leads to a file and a place in it, nothing is loaded from a network, and every public name has a page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

MODULES = ("mpikv", "mpikv.codecs", "mpikv.optimizers", "mpikv.schedules", "mpikv.testing")
# What a browser loads on its own.
LOADED = {"script", "link", "img", "iframe", "source", "object", "use", "style"}
# What a style sheet loads from a network.
STYLED = re.compile(r"""(?:url\(|@import)\s*["']?\s*((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """The names of places in a page, and its links with the tags that have them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[tuple[str, str]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag, name) == ("a", "name"):
                self.places.add(value or "")
            elif name in ("href", "src", "data") and value:
                self.links.append((tag, value))
            elif name == "srcset" and value:
                self.links += [(tag, each.split()[0]) for each in value.split(",")]
            elif name == "style" and value:
                self.links += [("style", link) for link in STYLED.findall(value)]

    def handle_data(self, data: str) -> None:
        if self.lasttag == "style":
            self.links += [("style", link) for link in STYLED.findall(data)]


def broken(path: Path, pages: dict[Path, Page]) -> Iterator[str]:
    for tag, link in pages[path].links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            if tag in LOADED and parts.scheme != "data":
                yield f"loads {link}"
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.is_file():
            yield f"leads to {link}, which is not there"
        elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places:
            yield f"leads to {link}, a page without that place"


def without_page(site: Path) -> Iterator[str]:
    for module in MODULES:
        known = import_module(module)
        for name in known.__all__:
            full = f"{module}.{name}"
            page = name if full in MODULES else full
            if not (site / "reference" / "api" / f"{page}.html").is_file():
                yield f"{full} has no page"


def main(site: Path) -> int:
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    faults = [f"{path.relative_to(site)}: {fault}" for path in pages for fault in broken(path, pages)]
    faults += without_page(site)
    for sheet in site.rglob("*.css"):
        faults += [f"{sheet.relative_to(site)} loads {link}" for link in STYLED.findall(sheet.read_text("utf-8"))]
    print("\n".join(faults), file=sys.stderr, end="\n" if faults else "")
    print(f"{len(pages)} pages, {sum(len(page.links) for page in pages.values())} links, {len(faults)} broken")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
