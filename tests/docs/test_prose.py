"""The prose of the README and of the pages is plain: counted in sentences, outside of code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
# Records, and tables that scripts write.
EXEMPT = ("bench", "decisions", "reference/api", "reference/faults.md", "reference/features.md", "reference/mutants.md")
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted(DOCS.glob("**/*.md")) if not page.relative_to(DOCS).as_posix().startswith(EXEMPT)),
]
RELATIVES = re.compile(r"\b(?:what|which|whose|whom)\b", re.IGNORECASE)
ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|vs|et al|No)|\bpp?)\.$")
FIELD_WORDS = ("all-reduce", "data parallel", "hierarchical", "zero-copy", "straggler", "ZeRO")


def prose(text: str) -> list[str]:
    """Return a page's paragraphs, items of lists and cells of tables: no code, headings, addresses or markup."""
    text = re.sub(r"^ *(`{3,}|~{3,}|:{3,}).*?^ *\1 *$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"(`+)[^`].*?\1", "CODE", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", text)
    found, paragraph = list[str](), list[str]()
    for line in [*text.splitlines(), ""]:
        stripped = line.strip().removeprefix("> ")
        item = re.match(r"(?:[-+*]|\d+\.)\s+", stripped)
        if not stripped or item or stripped.startswith(("#", "|")):
            found.append(" ".join(paragraph))
            paragraph = []
        if stripped.startswith("|"):
            found += [cell.strip() for cell in stripped.strip("|").split("|")]
        elif stripped and not stripped.startswith("#"):
            paragraph.append(stripped[item.end() :] if item else stripped)
    return [part for part in found if re.search(r"[a-z]{2}", part)]


def sentences(text: str) -> list[str]:
    """Return the sentences of a page; a cell of a table with words in it is at least one."""
    found = list[str]()
    for part in prose(text):
        start = 0
        for end in re.finditer(r"[.!?][)\"”]*(?=\s+[(\"“]?(?:[A-Z0-9]|mpikv))", part):
            if not ABBREVIATION.search(part[: end.start() + 1]):
                found.append(part[start : end.end()].strip())
                start = end.end()
        found.append(part[start:].strip())
    return [sentence for sentence in found if re.search(r"[a-z]{2}", sentence)]


def relatives(text: str) -> float:
    """Return how often *what*, *which*, *whose* and *whom* stand in 100 sentences."""
    found = sentences(text)
    return 100 * sum(len(RELATIVES.findall(sentence)) for sentence in found) / max(len(found), 1)


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 220


def test_the_sentences_of_the_readme_are_short() -> None:
    words = {sentence: len(sentence.split()) for sentence in sentences(README.read_text(encoding="utf-8"))}
    assert len(words) > 100
    assert [sentence for sentence, count in words.items() if count > 40] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_few_relative_words(page: Path) -> None:
    most = 12 if page == README else 15
    assert relatives(page.read_text(encoding="utf-8")) <= most


@pytest.mark.parametrize("word", FIELD_WORDS)
def test_the_words_of_the_field_lead_to_a_page_about_them(word: str) -> None:
    links = re.findall(r"\[([^]]*)\]\(([^)#]+)[^)]*\)([^|\n]*)", README.read_text(encoding="utf-8"))
    targets = [README.parent / target for text, target, after in links if word in text + after]
    assert targets
    assert all(word.lower() in target.read_text(encoding="utf-8").lower() for target in targets)
