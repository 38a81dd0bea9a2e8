"""The pages of the documentation, read as Markdown means them.

text = PAGES[0].read_text(encoding="utf-8")
commands(text)         # what somebody would type: "make demo", "ds-silent check ds_config.json"
links(text)            # where it leads: "docs/block.md", "#the-table", "https://..."
anchors(text)          # what a link into it may name: "the-table"
fences(text, "json")   # its examples in one language
paths(text)            # files of the project that it names in code spans
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OTHERS = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "ROADMAP", "SECURITY")]
PAGES = [*OTHERS, ROOT / "configs" / "README.md", *sorted(DOCS.glob("**/*.md"))]
PROGRAMS = (
    "make ",
    "python ",
    "pip ",
    "pytest ",
    "ds-silent ",
    "deepspeed ",
    "torchrun ",
    "accelerate ",
    "launch/",
    "tensorboard ",
)
SHELL = ("sh", "bash", "console")
"""Every line of a fence with one of these marks is a command; elsewhere one that begins with a known program."""


def commands(text: str) -> list[str]:
    """The commands of a page, in order: of fences and indented blocks, and code spans."""
    found = []
    for token in _tokens(text):
        if token.type == "fence" and token.info in SHELL:
            found += _lines(token.content)
        elif token.type in ("fence", "code_block", "code_inline") and not token.info:
            found += [line for line in _lines(token.content) if line.startswith(PROGRAMS)]
    return found


def links(text: str) -> list[str]:
    """Targets of links and pictures."""
    targets = (token.attrGet("href") or token.attrGet("src") for token in _tokens(text))
    return [str(target) for target in targets if target]


def anchors(text: str) -> list[str]:
    """The names of its headings, as GitHub makes them: "What it costs?" is "what-it-costs"."""
    tokens = MarkdownIt().parse(text)
    headings = [after for token, after in pairwise(tokens) if token.type == "heading_open"]
    names: list[str] = []
    for heading in headings:
        plain = "".join(child.content for child in heading.children or ())
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        again = sum(known == name or re.fullmatch(rf"{re.escape(name)}-\d+", known) is not None for known in names)
        names.append(f"{name}-{again}" if again else name)
    return names


def fences(text: str, language: str) -> list[str]:
    """The contents of the fences that are marked with ``language``."""
    return [token.content for token in _tokens(text) if token.type == "fence" and token.info == language]


def paths(text: str) -> list[str]:
    """Code spans that are the name of a file in one of the project's folders."""
    file = re.compile(r"(?:ds_silent|tests|benchmarks|launch|configs|docs)/[\w./-]+\.\w+")
    return [t.content for t in _tokens(text) if t.type == "code_inline" and file.fullmatch(t.content)]


def _tokens(text: str) -> list[Token]:
    """All of a page's, those inside its paragraphs and cells too."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    return [inner for token in tokens for inner in (token, *(token.children or ()))]


def _lines(code: str) -> list[str]:
    """Without remarks, and with continued lines in one."""
    plain = (
        re.sub(r"\s+", " ", re.split(r"(?:^| )# ", line)[0]).strip() for line in code.replace("\\\n", " ").splitlines()
    )
    return [line for line in plain if line]
