"""The pages of the documentation, as tests read them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TUTORIALS = ROOT / "docs" / "tutorials"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def read_tutorial(name: str) -> str:
    return (_TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
