"""Pages as another program reads them."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
from PIL import Image

VOID = frozenset(("meta", "br", "link", "img", "input", "rect", "line", "polyline", "circle"))


class Page(HTMLParser):
    """Elements of a page with their attributes, its headings, and its text without styles.

    Attributes
    ----------
    code
        Attributes that are scripts or styles, which the pages' policy blocks.
    """

    def __init__(self, page: bytes | str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.code: list[str] = []
        self.text = ""
        self.headings: list[str] = []
        self.balanced = True
        self._open: list[str] = []
        self.feed(page.decode() if isinstance(page, bytes) else page)
        self.close()
        self.balanced &= not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag in ("h1", "h3", "style"):
            self.headings.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self.code += [name for name, _ in attrs if name == "style" or name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        self.balanced &= self._open[-1:] == [tag]
        if tag in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if {"h1", "h3", "style"} & {*self._open}:
            self.headings[-1] += data
        if "style" not in self._open:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        """The attributes of each element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def pictures(self) -> dict[str, np.ndarray]:
        """The pixels of its pictures, by their text."""
        files = {e["alt"]: e["src"].partition(";base64,")[2] for e in self.all("img")}
        opened = {text: io.BytesIO(base64.b64decode(file)) for text, file in files.items()}
        return {text: np.asarray(Image.open(file)) for text, file in opened.items()}

    def link(self, rel: str) -> str | None:
        """The target of the first link of a kind."""
        return next((a["href"] for a in self.all("a") if a.get("rel") == rel), None)


def stands_alone(html: str, scripts: int = 0) -> Page:
    """Parse a page of which nothing is fetched, and nothing is run but its own scripts."""
    page = Page(html)
    assert page.balanced
    assert not page.code
    assert len(page.all("script")) == scripts
    assert ("script-src &#39;sha256-" in html) == (scripts > 0)
    assert not {"iframe", "object", "embed", "base"} & {tag for tag, _ in page.elements}
    pairs = [pair for _, attributes in page.elements for pair in attributes.items()]
    urls = [value for name, value in pairs if name in ("src", "href", "xlink:href", "action")]
    assert all(url.startswith(("#", "data:")) for url in urls)
    assert not re.search(r"url\((?!#)|@import|https?://", html)
    ids = [value for name, value in pairs if name == "id"]
    assert len(ids) == len(set(ids))
    return page
