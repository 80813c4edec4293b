"""Hooks of the documentation site: ``make docs-site``.

Adds pages that lie outside of ``docs/``. Rewrites links, so that the same sources work on the site
and in the repository.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)")
ADDED = {  # page of the site: file of the repository
    "benchmarks.md": "benchmarks/README.md",
    "benchmarks-history.md": "benchmarks/history.md",
    "contributing.md": "CONTRIBUTING.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of ``docs/``."""
    for page, source in ADDED.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let each link to a file of the repository lead to its page, or to the repository."""
    name = page.file.src_uri
    folder = posixpath.dirname(ADDED.get(name, f"docs/{name}"))

    def rewrite(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] + _address(target, posixpath.dirname(name), config, files)

    return LINK.sub(rewrite, markdown)


def _address(target: str, folder: str, config: MkDocsConfig, files: Files) -> str:
    """Return the link from a page in ``folder`` to a file of the repository."""
    pages = {source: page for page, source in ADDED.items()}
    page = pages.get(target, target.removeprefix("docs/"))
    if (target in pages or target.startswith("docs/")) and files.get_file_from_path(page):
        return posixpath.relpath(page, folder or ".")
    kind = "tree" if (ROOT / target).is_dir() else "blob"
    return f"{config.repo_url.rstrip('/')}/{kind}/main/{target}"
