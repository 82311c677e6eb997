"""Hooks of mkdocs: make README.md the first page, and publish the files outside docs/ that pages link to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
FROM_ROOT = {"index.md": "README.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
"""The pages that are files in the root of the repository, by their name in the site."""
_LINK = re.compile(r"\[([^\[\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from the root, and every other file that a page links to, to the site."""
    for name, source in FROM_ROOT.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for page in [page for page in files if page.src_uri.endswith(".md")]:
        for _, target, _ in _LINK.findall(page.content_string):
            path = _path(page.src_uri, target)
            name = _name_in_site(path)
            if path.is_file() and name and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Returns a page with links as they are in the site. A link to a folder of the repository becomes plain text."""

    def rewrite(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = _path(page.file.src_uri, target)
        if path.is_dir():
            return text
        name = _name_in_site(path)
        return f"[{text}]({name}{anchor})" if name else link[0]  # mkdocs complains about what is not there

    return _LINK.sub(rewrite, markdown)


def _path(page: str, target: str) -> Path:
    """Returns the file in the repository to which a page links."""
    return (ROOT / ("." if page in FROM_ROOT else "docs") / target).resolve()


def _name_in_site(path: Path) -> str | None:
    """Returns the name of a file of the repository in the site; all pages are in the root of the site."""
    if not path.is_relative_to(ROOT) or not path.exists():
        return None
    by_source = {source: name for name, source in FROM_ROOT.items()}
    name = path.relative_to(ROOT).as_posix()
    return by_source.get(name, name.removeprefix("docs/"))
