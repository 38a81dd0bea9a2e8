"""What mkdocs needs to know of the pages of docs/, so that they need not know of mkdocs: hooks of ``mkdocs.yml``.

* The pages stand in the order of the index, docs/README.md.
* A page may link to any file of the project, as on GitHub. What lies outside docs/ becomes a page or a picture below
  ``project/``, and the links follow.
* ``<!-- api: ds_silent.observing.observer.Observer -->`` stands where the docstring of that name is to be.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUTSIDE = "project"
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_API = re.compile(r"<!-- api: ([\w.]+)((?: [\w.]+)*) -->")
_ROLE = re.compile(r":\w+:<code>~?([^<]*)</code>")
_LANGUAGES = {".py": "python", ".json": "json", ".sh": "sh", ".sbatch": "sh"}


def on_config(config: Any) -> Any:
    """The pages in the order in which the index names them: it is the only list of them."""
    named = dict.fromkeys(found[2] for found in _LINK.finditer(_text(DOCS / "README.md")))
    pages = [name for name in named if name.endswith(".md") and (DOCS / name).is_file() and ".." not in name]
    config.nav = ["README.md", *pages]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds every file of the project that a page links to, and those that these link to."""
    waiting = list(DOCS.glob("*.md"))
    known = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target in known:
                continue
            known.add(target)
            if not target.is_relative_to(DOCS):
                files.append(_file(target, config))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text with its links as they are in the site, and docstrings where they belong."""
    if not page.file.src_uri.startswith(f"{OUTSIDE}/"):
        markdown = _with_links(markdown, DOCS / page.file.src_uri)
    return _API.sub(_directive, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """A name in a docstring as code, without the role that another tool would need."""
    return _ROLE.sub(r"<code>\1</code>", html)


def _directive(found: re.Match[str]) -> str:
    members = found[2].split()
    listed = f"[{', '.join(members)}]" if members else "false"
    return f"::: {found[1]}\n    options:\n      members: {listed}\n"


def _targets(page: Path) -> Iterator[Path]:
    for found in _LINK.finditer(_text(page)):
        target = (page.parent / found[2]).resolve()
        if "://" not in found[2] and target.is_file():
            yield target


def _with_links(text: str, page: Path) -> str:
    """``page``: where the text lies in the project."""
    here = _uri(page)

    def follow(found: re.Match[str]) -> str:
        target = (page.parent / found[2]).resolve()
        if "://" in found[2] or not target.is_file():
            return found[0]
        return found[1] + os.path.relpath(_uri(target), Path(here).parent).replace(os.sep, "/") + found[3]

    return _LINK.sub(follow, text)


def _uri(target: Path) -> str:
    """Where a file of the project lies in the site, below docs_dir."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    path = f"{OUTSIDE}/{target.relative_to(ROOT).as_posix()}"
    return path if target.suffix in (".md", ".png") else f"{path}.md"


def _file(target: Path, config: Any) -> File:
    if target.suffix == ".png":
        return File.generated(config, _uri(target), abs_src_path=str(target))
    text = _text(target)
    if target.suffix == ".md":
        return File.generated(config, _uri(target), content=_with_links(text, target))
    name = target.relative_to(ROOT).as_posix()
    fence = f"````{_LANGUAGES.get(target.suffix, 'text')}\n{text}````\n"
    return File.generated(config, _uri(target), content=f"# {target.name}\n\n`{name}`\n\n{fence}")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
