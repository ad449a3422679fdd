"""Pages about a store: rows that are found; over HTTP, in a file, and in a browser."""

import contextlib
import http.client
import itertools
import json
import math
import re
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import numpy as np
import pytest
from PIL import Image

import precache
from precache.errors import StorageError, UsageError
from precache.storage.open import open_folder
from precache.store import small_arrays, version
from precache.viewer import search
from precache.viewer.cards import side_of
from precache.viewer.search import Catalogue, Query
from precache.viewer.server import ViewServer
from tests.conftest import BuiltStore
from tests.support.browser import Tab
from tests.support.building import build_here, command, cut, encoded, pixels, running, write
from tests.support.command_line import Run
from tests.support.counting import MEAN
from tests.support.html_page import Page, stands_alone
from tests.support.servers import S3Server

HOSTILE = [
    "cat/<script>alert(1)<script>.png",
    'cat/"quo\'ted" & spaces.png',
    "cat/a?b#c%2e%2e&d=e.png",
    "<b onclick='alert(1)'>/x..;x.png",
    "ö/中 é\u202e.png",
]
BROKEN = "cat/broken <img src=x onerror=alert(1)>.jpg"
OPS: dict[str, list[dict[str, Any]]] = {
    "image": [{"op": "decode"}, {"op": "center_crop", "size": [40, 48]}],
    "small": [{"op": "decode", "mode": "L"}, {"op": "resize", "size": [12, 20]},
              {"op": "to_dtype", "dtype": "float32", "scale": True}],
    "mean": [{"op": "decode"}, MEAN],
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, make_store: Callable[..., BuiltStore]) -> Any:
    """Twelve images with plain and with hostile names, and one that is none."""
    root = tmp_path_factory.mktemp("raw")
    keys = [*HOSTILE, *(f"dog/{number:02d}.png" for number in range(7))]
    for number, key in enumerate(keys):
        write(root / key, encoded(cut(number, (52, 44)), "PNG"))
    write(root / BROKEN, b"no image at all")
    fields = {name: {"ops": ops} for name, ops in OPS.items()}
    return make_store(root, precache.Recipe.from_dict({"fields": fields}), shard_samples=4)


@contextlib.contextmanager
def served(*args: Any, **options: Any) -> Iterator[ViewServer]:
    with ViewServer(precache.view(*args, **options)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(built: BuiltStore) -> Iterator[ViewServer]:
    with served(str(built.path), rows=5) as server:
        yield server


Reply = tuple[int, dict[str, str], bytes]


def ask(server: ViewServer, path: str, host: str | None = None, method: str = "GET") -> Reply:
    """The reply to a request for a path below the server's root, or for one from "/" on."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    with contextlib.closing(connection):
        headers = {} if host is None else {"Host": host}
        connection.request(method, urljoin(server.root, path), headers=headers)
        reply = connection.getresponse()
        return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()


def page(server: ViewServer, path: str = "") -> Page:
    status, headers, body = ask(server, path)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    return Page(body)


def every_page(server: ViewServer, path: str = "") -> list[Page]:
    pages = [page(server, path)]
    while (target := pages[-1].link("next")) is not None:
        pages.append(page(server, target))
    return pages


def keys(pages: list[Page]) -> list[str]:
    return [each for read in pages for each in read.headings[2:]]  # behind the style sheet, h1


def test_pages_show_every_key_and_picture_as_they_are_and_no_other_markup(
    server: ViewServer, built: BuiltStore
) -> None:
    """And of a hole its reason."""
    pages, rows, small = every_page(server), pixels(built.path), pixels(built.path, "small")
    assert keys(pages) == list(built.open().keys)
    assert set(HOSTILE) < set(keys(pages))
    for read in pages:
        assert not {name for name, _ in read.elements} & {"script", "b", "iframe", "object"}
        assert not read.code
        for each in read.all("img"):
            assert each["alt"]
            assert set(each) <= {"src", "alt", "width", "height"}
    pictures = {alt: drawn for read in pages for alt, drawn in read.pictures.items()}
    for key in rows:
        stored = pictures[f"Stored image of {key}"]
        assert np.array_equal(stored, rows[key].transpose(1, 2, 0))
        values = small[key][0]
        scaled = (values - values.min()) / (values.max() - values.min()) * 255
        assert np.abs(pictures[f"Stored small of {key}"] - scaled).max() <= 0.5 + 1e-3
    assert len(rows) == 12
    [row] = built.open().hole_rows.tolist()
    read = page(server, "?rows=holes")
    assert (keys([read]), read.all("img")) == ([BROKEN], [])
    for address in ("?rows=holes", f"row/{row}"):
        assert "Hole: not an image that decode reads" in page(server, address).text
    assert "float32 (3,): " in page(server, f"row/{int(row == 0)}").text, "numbers are text"
    for number in (1, 64, 65, 300, 1000):  # pictures of many rows take no more than those of few
        assert 48 <= side_of(number) <= 128
        assert side_of(number) == 48 or number * side_of(number) ** 2 <= 1.01 * 64 * 128**2


def test_variants_of_a_sample_stand_side_by_side(
    tmp_path: Path, image_folder: Callable[..., Path]
) -> None:
    source, store = image_folder(3), tmp_path / "store"
    recipe = precache.Recipe.image(random_resized_crop=24, variants=3).with_fresh_variants()
    version = precache.open(build_here(source, store, recipe).path)
    key = version.keys[1]
    with served(str(store)) as server:
        shown = [each["alt"] for each in page(server).all("img") if "Stored" in each["alt"]]
        assert shown[1] == f"Stored image, variant 3 of {key}"  # as epoch 0 reads it
        read = page(server, "row/1")
        stored = {alt: png for alt, png in read.pictures.items() if "Stored" in alt}
        assert list(stored) == [f"Stored image, variant {number} of {key}" for number in (1, 2, 3)]
        for number, drawn in enumerate(stored.values(), 1):
            dataset = precache.CachedDataset(store, variant=number)
            assert np.array_equal(drawn, dataset[1]["image"].permute(1, 2, 0).numpy())


VOC = {1: "800000", 2: "008000", 3: "808000", 14: "408080", 255: "e0e0c0"}
"""Colours of some classes of Pascal VOC, as its own pictures have them."""


class Drawn:
    """Photos of several sizes with masks, boxes, the corners of these, and a point far away."""

    boxes = ([[20, 30, 90, 120], [3, 0, 5, 149]], [[100, 50, 200, 150]], [])

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, n: int) -> dict[str, Any]:
        photo, mask = cut(n, (200 + n, 150)), np.zeros((150, 200 + n), np.uint8)
        mask[4:20, 3:30], mask[8:40, 25:50], mask[:2] = 1 + n, 14, 255
        pngs = {"image": encoded(photo, "PNG"), "mask": encoded(Image.fromarray(mask), "PNG")}
        boxes = self.boxes[n]
        corners = [[[x1, y1], [x2, y2], [x2, y1], [1e30, 75]] for x1, y1, x2, y2 in boxes]
        return {**pngs, "boxes": boxes, "corners": corners, "label": None}


def test_masks_boxes_and_keypoints_lie_over_their_images(tmp_path: Path) -> None:
    fields = {
        "image": {"ops": [{"op": "decode"}]}, "mask": {"ops": [{"op": "decode", "mode": "P"}]},
        "boxes": {"kind": "boxes"}, "corners": {"kind": "keypoints", "of": "boxes"},
    }  # fmt: skip
    recipe = precache.Recipe.from_dict({"fields": fields})
    build_here(f"python:{__name__}:Drawn", tmp_path, recipe)
    dataset, colours = precache.CachedDataset(tmp_path), np.zeros((256, 3), int)
    colours[[*VOC]] = [[*bytes.fromhex(colour)] for colour in VOC.values()]
    with served(str(tmp_path)) as server:
        for row, key in enumerate(dataset.keys):
            read = page(server, f"row/{row}")
            plain, classes = dataset[row]["image"].numpy(), dataset[row]["mask"][0].numpy()
            plain = plain.transpose(1, 2, 0)
            masked = np.where(classes[..., None] > 0, (plain + colours[classes]) // 2, plain)
            assert np.array_equal(read.pictures[f"mask over image of {key}"], masked)
            assert ", 14, 255" in read.text
            boxed, pointed = plain.copy(), plain.copy()
            for x1, y1, x2, y2 in Drawn.boxes[int(key)]:
                inside = slice(y1 + 5, y2 - 5), slice(x1 + 5, x2 - 5)
                boxed[y1:y2, x1:x2] = 255, 0, 0
                boxed[inside] = plain[inside]
                for x, y in ((x1, y1), (x2, y2), (x2, y1)):
                    pointed[max(0, y - 2) : y + 3, max(0, x - 2) : x + 3] = 255, 0, 0
            for name, wanted in (("boxes", boxed), ("corners", pointed)):
                assert np.array_equal(read.pictures[f"{name} over image of {key}"], wanted)
        small = page(server).pictures["boxes over image of 0"]
        assert (small == [255, 0, 0]).all(2).sum() > 60
    precache.view(tmp_path, find="0").write(tmp_path / "page.html")
    read = Page((tmp_path / "page.html").read_text("utf-8"))
    assert keys([read]) == ["0"]
    assert "Pictures have at most 128 pixels a side" in read.text
    assert {picture.shape[:2] for picture in read.pictures.values()} == {(75, 100)}


@pytest.mark.parametrize(
    ("labels", "options", "links"),
    [
        ("a,cat|dog\nb,dog\nc,", {"label_separator": "|"}, {"cat": ["a"], "dog": ["a", "b"]}),
        ("a,0.1\nb,2.5\nc,0.1", {"label_kind": "value"}, {"0.1": ["a", "c"], "2.5": ["b"]}),
    ],
)
def test_links_lead_to_the_rows_of_each_class_and_number(
    labels: str, options: dict[str, Any], links: dict[str, list[str]], tmp_path: Path
) -> None:
    for line in labels.split("\n"):
        write(tmp_path / f"{line[0]}.png", encoded(cut(1, (20, 20)), "PNG"))
    (tmp_path / "in.csv").write_text("path,label\n" + labels.replace(",", ".png,"))
    precache.build(tmp_path / "in.csv", tmp_path / "store", address="serial", **options)
    with served(str(tmp_path / "store")) as server:
        shown = [each["href"] for each in page(server).all("a") if "class=" in each["href"]]
        found = {
            link.partition("class=")[2]: sorted(key[0] for key in keys(every_page(server, link)))
            for link in shown
        }
    assert found == links


def test_what_is_shown_is_there_as_json(
    server: ViewServer, built: BuiltStore, tmp_path: Path
) -> None:
    status, headers, body = ask(server, "rows.json?class=dog&from=0")
    assert (status, headers["content-type"]) == (200, "application/json")
    data, version = json.loads(body), built.open()
    assert [row["key"] for row in data["rows"]] == keys([page(server, "?class=dog")])
    assert all(row["labels"] == ["dog"] for row in data["rows"])
    assert data["info"]["version"] == version.id
    deviation = f"{version.std['image'][2]:.2f}"
    for told in (version.id, "decode → center_crop(size=(40, 48))", deviation):
        assert told in page(server).text
    assert data["info"]["recipe"] == version.recipe.to_dict()
    following = json.loads(ask(server, f"rows.json?class=dog&from={data['next']}")[2])
    assert following["rows"][0]["row"] >= data["next"] > data["rows"][-1]["row"]
    precache.view(built.path, label="dog", rows=5).write(tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text())["next"] == data["next"]


def test_damage_is_told_and_the_other_rows_are_shown(
    built: BuiltStore, copy_store: Callable[[BuiltStore], BuiltStore], s3: S3Server
) -> None:
    """Also of a store in a bucket."""
    damaged, url, options = copy_store(built), "s3://bucket/view", {"storage_options": s3.options()}
    precache.pull(built.path, url, **options)
    damaged.shard_path(0).write_bytes(b"")
    open_folder(url, s3.options()).put(f"{built.result.version}/image/c/0/0/0/0", [b""])
    for store, more in ((str(damaged.path), {}), (url, options)):
        with served(store, **more) as server:
            read = page(server)
            assert "is damaged" in read.text
            assert len(read.all("img")) > 4
            assert "is damaged" in page(server, "row/0").text or 0 in built.open().hole_rows
            assert {alt.split()[0] for alt in read.pictures} == {"Stored"}


EVIL = ("evil.example", "evil.example:80", "", "localhost.evil.example", "[::1]",
        "127.0.0.1.evil.example", "localhost:80@evil.example")  # fmt: skip
NOTHING, WRONG = "there is nothing at this address", "is not a row number"
ANSWERS: list[tuple[str, dict[str, str], int, str]] = [
    *(("", {"host": host}, 200, "") for host in ("127.0.0.1", "localhost:9999", "LOCALHOST:80")),
    *(("", {"host": host}, 403, "127.0.0.1 or localhost") for host in EVIL),
    *((path, {}, 404, "open the address")
      for path in ("/", "/x", "/{short}/", "/../{short}x/", "//evil.example/")),
    *(("", {"method": name}, 501, "") for name in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS")),
    *((path, {}, 200, "") for path in ("row/0", "rows.json")),
    ("?class=<b>", {}, 200, "has no class '<b>'"),
    *((f"row/{row}", {}, 404, WRONG) for row in ("-1", "x", "", "²", "9" * 20)),
    *((path, {}, 404, NOTHING) for path in ("row/1/2", "raw/%2e%2e/etc/passwd", "nothing")),
    *((path, {}, 404, WRONG) for path in ("?from=x", "?from=-1")),
    ("row/%3Cscript%3E", {}, 404, "'<script>' is not a row number"),
    ("row/13", {}, 404, "there is no row 13; rows go from 0 to 12"),
    ("?rows=some", {}, 404, "'some' is not one of all, valid, holes"),
    ("?" + "a=1&" * 30, {}, 404, "the address has too many parts"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "how", "status", "text"), ANSWERS)
def test_what_makes_no_sense_is_refused_and_no_answer_allows_scripts_frames_or_other_hosts(
    server: ViewServer, path: str, how: dict[str, str], status: int, text: str
) -> None:
    """Of this machine's names and the whole address alone."""
    target = quote(path.format(short=server.root[1:-2]), safe="/?=&%.")
    got, headers, body = ask(server, target, **how)
    read = Page(body)
    assert (got, text in read.text, read.all("script")) == (status, True, [])
    assert not read.code or "html" not in headers["content-type"]
    fixed = {"x-content-type-options": "nosniff", "cache-control": "no-store", "server": "precache"}
    assert headers.items() >= fixed.items()
    policy = headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert (rules["img-src"], "script-src" in rules, "unsafe" in policy) == ("data:", False, False)
    if status == 404 and text != "open the address":
        assert headers["content-type"] == "text/html; charset=utf-8"
        [home] = read.all("a")
        leads = urljoin(server.root + path.partition("?")[0], home["href"])
        assert leads in (server.root, server.root[:-1])


def test_the_command_serves_until_ctrl_c(built: BuiltStore) -> None:
    line = command("view", built.path, "--label", "dog")
    with running(line) as process:
        assert process.stdout is not None
        url = urlsplit(process.stdout.readline().strip())
        assert (url.hostname, url.query) == ("127.0.0.1", "class=dog")
        assert len(url.path) > 15
        for file in Path("/proc").glob("[0-9]*/cmdline"):  # which all users see
            with contextlib.suppress(OSError):
                assert url.path.strip("/").encode() not in file.read_bytes()
        with socket.create_connection(("127.0.0.1", url.port or 0)) as reset:
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection = http.client.HTTPConnection("127.0.0.1", url.port or 0, timeout=60)
        connection.request("GET", f"{url.path}?{url.query}")
        read = Page(connection.getresponse().read())
        assert all(key.startswith("dog/") for key in keys([read]))
        process.send_signal(signal.SIGINT)  # the connection is still open
        out, err = process.communicate(timeout=60)
        connection.close()
    assert (process.returncode, out) == (0, "")
    assert err == "precache: only this machine can open this address; press Ctrl-C to stop\n"


def test_what_cannot_be_written_or_served_is_said(built: BuiltStore, tmp_path: Path) -> None:
    view = precache.view(built.path)
    with pytest.raises(StorageError, match="cannot write"):
        view.write(tmp_path)
    with pytest.raises(UsageError, match="has no class 'dgo'; did you mean dog"):
        precache.view(built.path, label="dgo").write(tmp_path / "x.html")
    with pytest.raises(UsageError, match="cannot listen on port 99999"):
        ViewServer(view, 99999)
    with ViewServer(view) as other, pytest.raises(UsageError, match="give another"):
        ViewServer(view, other.server_port)


def test_a_static_page_needs_nothing_else_and_is_bounded(
    built: BuiltStore, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "page.html"
    ran = run("view", built.path, "--rows", 20, "--out", out)
    assert (ran.status, ran.err) == (0, f"wrote {out}\n")
    read = stands_alone(out.read_text("utf-8"))
    assert keys([read]) == list(built.open().keys)
    assert read.all("a") == read.all("form") == []
    [rules] = [each["content"] for each in read.all("meta") if "http-equiv" in each]
    policy = r"default-src 'none'; style-src 'sha256-\S+'; img-src data:; form-action 'none'; "
    assert re.fullmatch(policy + "base-uri 'none'", rules)
    assert len(read.pictures) == 2 * 12


def test_pages_are_fine_in_a_browser(
    server: ViewServer, built: BuiltStore, tmp_path: Path, tab: Tab
) -> None:
    [hole] = built.open().hole_rows.tolist()
    precache.view(built.path).write(tmp_path / "page.html")
    drawn = "[...document.images].every(each => each.naturalWidth > 0) && document.images.length"
    tab.fine(tmp_path / "page.html")
    for path, images in (("", 4), ("?rows=holes", 0), ("row/0", 2), (f"row/{hole}", 0)):
        tab.fine(server.url + path)
        assert tab.run(drawn) >= images


def test_paging_and_searches_read_the_keys_that_they_need_alone(
    tiles: Path, make_store: Callable[..., BuiltStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of eight, of 25 cats, 25 dogs and 25 eels, the last dog and eel being holes."""
    chunks_read, decode = list[str](), version.decode_strings

    def spy(data: bytes, where: str, count: int) -> Any:
        chunks_read.append(where.rpartition("/")[2])
        return decode(data, where, count)

    monkeypatch.setattr(version, "decode_strings", spy)
    for module in (small_arrays, version, search):
        monkeypatch.setattr(module, "KEYS_PER_CHUNK", 8)
    store = make_store(tiles, keep_order=True)
    shown = Catalogue(str(store.path))
    for query, start, rows, read in (
        (Query(), 60, range(60, 65), ""),  # nothing is asked of keys
        (Query("74", state="holes"), 0, [74], "69"),  # those of the two holes
        (Query("dog/"), 0, range(25, 30), "0123"),
        (Query("eel/"), 30, range(50, 55), "45"),  # others are kept from the searches before
    ):
        found = shown.find(query, start, 5)
        assert (found.rows, found.first, chunks_read) == ([*rows], start, [*read])
        chunks_read.clear()
    counts = [(label, rows) for label, _, rows in shown.counts]
    assert counts == [(0, 25), (1, 24), (2, 24)]
    keys = sorted(str(path.relative_to(tiles)) for path in tiles.rglob("*.png"))
    assert shown.key(60) == keys[60]
    assert chunks_read == ["7"]


LABELS = {"": "", "<b onclick='alert(1)'>": "<b", "cat": "cat/", "2": "dog/", "-1": "none"}
"""Classes that are asked for, and how the keys of their rows begin."""
TEXTS = ("", "dog/", "1", "x", *HOSTILE)


@pytest.mark.parametrize(("count", "start"), [(1, 0), (4, 3), (100, 0), (5, 10**17)])
def test_pages_show_every_row_that_is_asked_for_once(
    built: BuiltStore, count: int, start: int
) -> None:
    """With what was asked for in their form, and with a link to the first one."""
    rows = list(built.open().keys)[start:]
    with served(str(built.path), rows=count) as server:
        for query in itertools.starmap(Query, itertools.product(TEXTS, LABELS, search.STATES)):
            right = [
                key for key in rows if query.text in key and key.startswith(LABELS[query.label])
                and query.state in ("all", "holes" if key == BROKEN else "valid")
            ]  # fmt: skip
            pages = every_page(server, query.link(start))
            assert keys(pages) == right
            assert all(len(keys([each])) == count for each in pages[:-1])
            assert len(pages) == max(1, math.ceil(len(right) / count))
            for number, each in enumerate(pages):
                values = {field.get("name"): field.get("value") for field in each.all("input")}
                assert (values["q"], values["class"]) == (query.text, query.label)
                assert not (number or start) or query.link() in [a["href"] for a in each.all("a")]
