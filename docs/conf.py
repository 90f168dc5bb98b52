"""Builds the site of these pages. Run it by scripts/docs, which copies the pages and names the copy as the source."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

import mpikv

ROOT = Path(__file__).parents[1]

project, author = "mpikv", "the authors of mpikv"
version = release = mpikv.__version__
# furo: a style sheet and a small script of its own, no fonts, no framework; light and dark follow the reader.
html_theme = "furo"
html_title = f"mpikv {version}"
html_copy_source = html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
exclude_patterns = ["_templates"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary"]
myst_heading_anchors = 3
# The notebook starts ranks; where its cells fail, so does the build.
nb_execution_mode, nb_execution_timeout, nb_execution_raise_on_error = "force", 300, True

add_module_names = False
autodoc_member_order = "bysource"
autodoc_mock_imports = ["jax", "optax", "torch"]  # which are large, and of which the site needs nothing
autodoc_default_options = {"members": True, "show-inheritance": True}
maximum_signature_line_length = 88
# Types in signatures: of Python, of other packages, and of modules that no caller names. They have no pages here.
nitpick_ignore_regex = [
    (
        "py:class",
        r"(numpy|np|collections|contextlib|pathlib|types)\..*|mpikv\.\w+\.(\w+\.|_).*|mpikv\.verbs\..*|[A-Z]\w+",
    )
]
suppress_warnings = ["ref.python"]  # the word `type` in a signature, which two stores have as a property

# Pages of the root that are pages of the site, too.
COPIED = {"changelog": ROOT / "CHANGELOG.md", "contributing": ROOT / "CONTRIBUTING.md"}
LINK = re.compile(r"\]\((?![a-z]+:|#|/)([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".cu": "cuda", ".h": "cuda"}


def resolve(name: str, link: str, anchor: str) -> str:
    """Return what a link of a page leads to in the site, where each linked file outside of docs has a page."""
    page = COPIED.get(name, ROOT / "docs" / name)
    path = Path(os.path.normpath(page.parent / link))
    if path.is_dir():
        path /= "README.md" if (path / "README.md").exists() else "__init__.py"
    if path == ROOT / "README.md":
        return "/index.md"
    for copy, original in COPIED.items():
        path = ROOT / "docs" / f"{copy}.md" if path == original else path
    if path.is_relative_to(ROOT / "docs"):
        return f"/{path.relative_to(ROOT / 'docs')}{anchor}"
    return f"/source/{path.relative_to(ROOT)}.md" if path.is_file() else link


def write_pages(app: Sphinx) -> None:
    """Write the pages that are no files of docs into its copy: those of the root, and files that a page leads to."""
    source = Path(app.srcdir)
    for name, original in COPIED.items():
        (source / f"{name}.md").write_text(original.read_text(encoding="utf-8"), encoding="utf-8")
    for page in sorted(source.rglob("*.md")):
        name = page.relative_to(source).with_suffix("").as_posix()
        for link, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            copy = resolve(name, link, anchor)
            if copy.startswith("/source/"):
                write_file(source / copy[1:], ROOT / copy.removeprefix("/source/").removesuffix(".md"))


def write_file(page: Path, original: Path) -> None:
    """Write the page of a file: its path and its text."""
    text = original.read_text(encoding="utf-8")
    language = LANGUAGES.get(original.suffix, "python" if "python" in text.partition("\n")[0] else "text")
    page.parent.mkdir(parents=True, exist_ok=True)
    title = original.relative_to(ROOT).as_posix()
    page.write_text(f"---\norphan: true\n---\n# {title}\n\n````````{language}\n{text}````````\n", encoding="utf-8")


def resolve_links(app: Sphinx, name: str, text: list[str]) -> None:
    """Rewrite the links of a page."""
    if not name.startswith("source/"):
        text[0] = LINK.sub(lambda match: f"]({resolve(name, match[1], match[2] or '')})", text[0])
    # The records of scripts/gpu_check: there may be none, so no table of contents can have them.
    if name.startswith("gpu/"):
        text[0] = f"---\norphan: true\n---\n{text[0]}"


def read_sections(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Turn sections of docstrings into fields, of attributes as of functions.

    With ``what`` the extension takes the words before a colon in the text of an attribute for its type.
    """
    lines[:] = GoogleDocstring(lines, what="function", name=name, obj=thing).lines()


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", read_sections)
    app.connect("builder-inited", write_pages)
    app.connect("source-read", resolve_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
