"""The documentation as a site: complete, built strictly, and shown by a browser."""

import ast
import functools
import inspect
import itertools
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from http.server import SimpleHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path

import pytest

import precache
from tests.support.browser import CHROMIUM, chromium
from tests.support.servers import answering

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "docs/site/mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocstrings_handlers") is None or find_spec("material") is None:
        pytest.skip("needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    subprocess.run((*command, "--config-file", CONFIGURATION), check=True, cwd=ROOT)
    return folder


def test_the_page_of_the_api_has_all_public_names() -> None:
    page = (ROOT / "docs/reference/api.md").read_text("utf-8")
    names = re.findall(r"^(?:::: |`)precache\.([A-Za-z_]+)(?![.\w])", page, re.MULTILINE)
    modules = {"transforms", "outputs", "lightning"}
    assert set(names) - modules == set(precache.__all__)
    assert len(names) == len(set(names))


def test_the_page_of_the_api_has_all_that_public_functions_return() -> None:
    page = (ROOT / "docs/reference/api.md").read_text("utf-8")
    shown = set(re.findall(r"^::: [\w.]*\.(\w+)$", page, re.MULTILINE))
    for function in filter(inspect.isfunction, map(precache.__getattr__, precache.__all__)):
        returned = re.findall(r"\w+", inspect.signature(function).return_annotation)
        assert {*returned} - {"Batch", "None", "list"} <= shown, function


Parameters = dict[str, tuple[str | None, str | None]]
"""Name -> type and default, as Python."""


def _text(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html)).strip()


def _python(html: str) -> str | None:
    """Return Python in one form; None for an empty text."""
    text = _text(html)
    return ast.unparse(ast.parse(text, mode="eval")) if text else None


def _signature(html: str) -> Parameters:
    """Parse the signature of a function or class; a class without parameters may show none."""
    shown = re.search(r'<div class="doc-signature.*?">(.*?)</div>', html, re.DOTALL)
    (function,) = ast.parse(f"def {_text(shown[1]) if shown else '_()'}: ...").body
    assert isinstance(function, ast.FunctionDef)
    names, kept = function.args, [function.args.vararg, function.args.kwarg]
    required = [None] * (len(names.args) - len(names.defaults))
    defaults = [*required, *names.defaults, *names.kw_defaults, None, None]
    return {
        name.arg: (name.annotation and ast.unparse(name.annotation), value and ast.unparse(value))
        for name, value in zip([*names.args, *names.kwonlyargs, *kept], defaults, strict=True)
        if name is not None
    }


def _list(html: str) -> Parameters:
    """Parse the lists of parameters that follow a signature."""
    row = (
        r"<b><code>(\w+)</code></b>\s*\(<code>(.*?)</code>(?:, default:\s*<code>(.*?)</code>)?\s*\)"
    )
    sections = re.findall(r">Parameters:</span>.*?(?=doc-section-title|$)", html, re.DOTALL)
    rows = re.findall(row, "".join(sections), re.DOTALL)
    return {name: (_python(kind), _python(default)) for name, kind, default in rows}


@pytest.mark.heavy
def test_the_page_of_the_api_shows_the_parameters_of_signatures(site: Path) -> None:
    page = (site / "reference/api.html").read_text("utf-8")
    _, *parts = re.split(r'<h\d id="(precache[\w.]*\.[\w.]+)"', page)
    objects = dict(zip(parts[::2], parts[1::2], strict=True))
    if find_spec("lightning") is None:
        objects = {path: html for path, html in objects.items() if "lightning" not in path}
    assert _list(objects["precache.Loader"]).keys() >= {"shuffle", "seed", "cache"}
    for path, html in objects.items():
        value = pkgutil.resolve_name(path)
        if not callable(value) or value.__new__ is tuple.__new__:
            continue
        if inspect.isclass(value) and issubclass(value, Exception):
            continue
        actual = dict(inspect.signature(value).parameters)
        for name in ("self", "values"):  # models refuse values without a name
            actual.pop(name, None)
        shown = _signature(html)
        assert list(shown) == list(actual), path
        assert _list(html).items() <= shown.items(), path
        names = vars(sys.modules[value.__module__])
        for name, (_, default) in shown.items():
            expected = actual[name].default
            if not repr(expected).startswith("<function") and repr(expected) != "<factory>":
                found = inspect.Parameter.empty if default is None else eval(default, names)
                assert found == expected, (path, name)


def test_the_plot_and_the_readme_have_the_figures_of_the_table() -> None:
    from tests.bench.peers.plot import PLOT, draw, table_rows

    texts = re.compile(r">([^<>]+)</text>")
    rows = table_rows(ROOT / "docs/concepts/performance.md")
    assert texts.findall(PLOT.read_text("utf-8")) == texts.findall(draw(rows))
    for row in table_rows(ROOT / "README.md"):
        assert row.items() <= next(r for r in rows if r["loader"] == row["loader"]).items()


@pytest.mark.heavy
def test_the_site_is_built_strictly_and_needs_no_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        html = page.read_text("utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="?([^" >]+)', html)
        loaded += re.findall(r'<link[^>]* rel="?(?:stylesheet|icon)[^>]* href="?([^" >]+)', html)
        assert not [url for url in loaded if "//" in url], page


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    with answering(handler) as url:
        yield f"{url}/"


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_pages_fit_a_dark_phone_and_a_light_desk(site: Path, address: str, tmp_path: Path) -> None:
    pages = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    with chromium(tmp_path) as tab:
        for page, (width, dark) in itertools.product(pages, ((400, True), (1400, False))):
            tab.open(address + page, width, dark=dark)
            scheme = "slate" if dark else "default"
            tab.until(f"document.body.dataset.mdColorScheme == '{scheme}'")
            tab.until("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
            assert tab.run("document.documentElement.scrollWidth") <= width, (page, width)
            assert tab.errors == [], page
        assert all(url.startswith((address, "data:")) for url in tab.requests)
