"""The site's pages that lie outside of docs/, and the links to them."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "deploy/README.md": "deploy.md",
    "tests/bench/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
}
"""Path in the repository -> path in the site."""
IN_REPOSITORY = {site: path for path, site in OUTSIDE.items()}

FLAG = re.compile(r"<code>(?=-[^\s<]*</code>)")

LINK = re.compile(r"""(\]\(|(?:src|srcset)=")(?![a-z]+:|#)([^)#"]+)""")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages of `OUTSIDE`."""
    for path, site in OUTSIDE.items():
        files.append(File.generated(config, site, content=(ROOT / path).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite relative links from paths in the repository to paths in the site."""
    site = page.file.src_uri
    if site.startswith("coming-from/"):
        page.meta["hide"] = ["toc"]  # room for code side by side
    here = posixpath.dirname(IN_REPOSITORY.get(site, f"docs/{site}"))

    def rewrite(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link[2]))
        target = OUTSIDE.get(target, target.removeprefix("docs/"))
        return link[1] + posixpath.relpath(target, posixpath.dirname(site) or ".")

    return LINK.sub(rewrite, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Mark the flags of commands, which browsers would split at their hyphens."""
    return FLAG.sub('<code class="flag">', html)
