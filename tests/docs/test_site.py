"""The check of the built site finds what is wrong with it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "check_site.py"))
PAGE = '<html><body><h1 id="top">t</h1><a href="https://example.org/">elsewhere</a>{}</body></html>'


@pytest.mark.parametrize(
    ("inner", "complaint"),
    [
        ('<a href="b.html">b</a><a href="b.html#top">b</a><a href="#top">here</a>', ""),
        ('<a href="c.html">c</a>', "leads to c.html, which is not there"),
        ('<a href="b.html#end">b</a>', "leads to b.html#end, a page without that place"),
        ('<script src="https://cdn.example.org/x.js"></script>', "loads https://cdn.example.org/x.js"),
        ('<img src="//cdn.example.org/x.png">', "loads //cdn.example.org/x.png"),
        ('<img srcset="b.html 1x, //cdn.example.org/x.png 2x">', "loads //cdn.example.org/x.png"),
        ('<style>@import "https://cdn.example.org/x.css";</style>', "loads https://cdn.example.org/x.css"),
        ("<p style=\"background: url( '//cdn.example.org/x.png')\">", "loads //cdn.example.org/x.png"),
        ('<meta name="viewport"><a href="#viewport">v</a>', "leads to #viewport, a page without that place"),
    ],
)
def test_links(tmp_path: Path, capsys: pytest.CaptureFixture[str], inner: str, complaint: str) -> None:
    (tmp_path / "a.html").write_text(PAGE.format(inner))
    (tmp_path / "b.html").write_text(PAGE.format(""))
    SCRIPT["main"](tmp_path)
    found = [line for line in capsys.readouterr().err.splitlines() if not line.endswith(" has no page")]
    assert found == ([f"a.html: {complaint}"] if complaint else [])


def test_names_without_a_page_and_fonts_of_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.css").write_text("@font-face { src: url('https://fonts.example.org/x.woff') }")
    assert SCRIPT["main"](tmp_path) == 1
    complaints = capsys.readouterr().err.splitlines()
    assert "mpikv.create has no page" in complaints
    assert "a.css loads https://fonts.example.org/x.woff" in complaints
