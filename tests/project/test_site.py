"""The pages of docs/ as a site: built without a warning and without a network, and everything in it leads somewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.support.pages import DOCS, ROOT, links

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")


class Page(HTMLParser):
    """What one page names: its anchors, what its links lead to, and what a browser loads for it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = set[str](), set[str](), set[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attributes}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.links.add(named["href"])
        elif tag == "link" and named.get("rel") != "canonical":
            self.loaded.add(named["href"])
        elif "src" in named:
            self.loaded.add(named["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    nobody = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)],
        cwd=ROOT,
        env={**os.environ, **nobody, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return directory


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.glob("**/*.html")}


@pytest.mark.long
def test_every_page_is_there_and_in_the_order_of_the_index(pages: dict[Path, Page], site: Path) -> None:
    names = {path.relative_to(site).as_posix() for path in pages}
    assert {f"{page.stem}.html" for page in DOCS.glob("*.md")} - {"README.html"} <= names
    text = (site / "limits.html").read_text(encoding="utf-8").split("<body")[1]
    index = [link.replace(".md", ".html") for link in links((DOCS / "README.md").read_text(encoding="utf-8"))]
    places = [text.index(f'href="{name}"') for name in index if "/" not in name and name in names - {"limits.html"}]
    assert len(places) > 15
    assert places == sorted(places)


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page], site: Path) -> None:
    found = {(path.name, address) for path, page in pages.items() for address in page.loaded if "//" in address}
    assert found == set()
    for style in site.glob("assets/**/*.css"):
        text = style.read_text(encoding="utf-8")
        assert "@import" not in text
        assert "url(http" not in text.replace('"', "")


def test_links_of_the_site_lead_somewhere(pages: dict[Path, Page], site: Path) -> None:
    lost = set()
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are for the root of a server
        for link in page.links | page.loaded:
            address, anchor = urldefrag(unquote(link))
            if "//" in address or address.startswith(("data:", "javascript:")):
                continue
            target = (path.parent / address).resolve() if address else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                lost.add((path.relative_to(site).as_posix(), link))
    assert lost == set()


def test_the_public_interface_has_its_docstrings(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    assert "same arguments, same result" in text
    assert "micro-batches per step, where the script accumulates" in text
    assert "<!-- api" not in text
    assert ":class:" not in text
    assert ":func:" not in text
