"""Sources and stores on the web, ``https://`` above all, against servers of files."""

import contextlib
import os
import ssl
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pytest

import precache
from precache.errors import StorageError
from precache.storage import fsspec_services, retries
from precache.storage.base import Folder, is_missing, required
from precache.storage.open import open_folder
from tests.storage.conftest import RECIPE, actions
from tests.support.building import assert_same, contents, cut, encoded, pixels, write
from tests.support.servers import Certificate, Handler, answering, web_server


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """One that nobody trusts who is not told to."""
    made = Certificate.make(tmp_path_factory.mktemp("certificate"))
    if made is None:
        pytest.skip("there is no openssl to make a certificate")
    return made


@pytest.fixture
def https(served: Path, certificate: Certificate) -> Iterator[str]:
    """The URL of that folder."""
    with web_server(served, certificate=certificate) as url:
        yield url
    fsspec.get_filesystem_class("https").clear_instance_cache()


class _Answer(Handler):
    """Answers all requests alike: with `page`, and again and again with `endless`."""

    protocol_version = "HTTP/1.0"  # whose connections end with an answer
    status = 200
    page = b""
    endless = b""
    about: Mapping[str, str] = MappingProxyType({"Content-Type": "text/html"})

    def do_GET(self) -> None:
        if not self.endless:
            self.send(self.status, self.page, self.about)
            return
        self.send_response(self.status)
        for name, value in self.about.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # until nobody reads on
            self.wfile.write(self.page)
            while self.endless:
                self.wfile.write(self.endless)

    do_HEAD = do_GET


ENDLESS_PAGE = {"endless": b'<a href="a.jpg">a.jpg</a>' * 1000}
_packed = zlib.compressobj(wbits=31)
_zeros = [_packed.compress(bytes(1 << 20)) + _packed.flush(zlib.Z_FULL_FLUSH) for _ in range(2)]
ENDLESS_ZEROS = {"page": _zeros[0], "endless": _zeros[1], "about": {"Content-Encoding": "gzip"}}


@contextlib.contextmanager
def serving(handler: type[Handler] = _Answer, **how: Any) -> Iterator[Folder]:
    """A folder of a server whose answers have these attributes."""
    with answering(type("Handler", (handler,), how)) as url:
        yield open_folder(f"{url}/photos/")
    fsspec.get_filesystem_class("http").clear_instance_cache()


def test_pages_that_list_themselves_have_an_end() -> None:
    with (
        serving(page=b'<a href="a/">a/</a> <a href="x.jpg">x.jpg</a>') as folder,
        pytest.raises(StorageError, match=r"cannot list http.*/photos: .* 64 folders .*a/a/a"),
    ):
        list(folder.walk())


def test_more_is_missing_than_there_are_connections() -> None:
    with serving(status=404, page=bytes(1 << 20)) as folder:
        found = folder.read_many([f"{number}.json" for number in range(150)], [-1] * 150)
    assert all(isinstance(each, StorageError) and is_missing(each) for each in found)


class _Redirects(_Answer):
    """Files lie where `to` says."""

    to: str

    def do_GET(self) -> None:
        path, port = urlsplit(self.path).path, self.server.server_address[1]  # type: ignore[index]
        if path.startswith("/photos/") and not path.startswith("/photos/below/"):
            self.status, self.about = 302, {"Location": self.to.format(port=port)}
        else:
            self.page = b"2"
        super().do_GET()

    do_HEAD = do_GET


@contextlib.contextmanager
def redirecting(to: str, *, follow_links: bool = False) -> Iterator[Folder]:
    """A folder of a server that redirects each of its files."""
    with serving(_Redirects, to=to) as folder:
        yield open_folder(str(folder), follow_links=follow_links)


def reads_of(folder: Folder) -> Iterator[Callable[[], object]]:
    """Every way to have a file of a folder, or to look at it."""
    yield from actions(folder, "a.jpg")
    yield lambda: folder.names("a")
    yield lambda: folder.folder("b").read("c.jpg")


@pytest.mark.parametrize(
    "to",
    [
        "http://localhost:9/photos/below/secret.jpg",
        "//localhost:9/photos/below/secret.jpg",
        "/secret.jpg",
        "../secret.jpg",
        "/photosecret/a.jpg",
        "/photos/below/../../secret.jpg",
        "/photos/below/%2e%2e/%2e%2e/secret.jpg",
        "/photos/below/..%2f..%2fsecret.jpg",
        "https://127.0.0.1:9/photos/below/secret.jpg",
        "http://user@127.0.0.1:9/photos/below/secret.jpg",
        "http://:password@127.0.0.1:{port}/photos/below/secret.jpg",
        "file:///photos/below/secret.jpg",
    ],
)
def test_a_redirect_out_of_a_folder_is_not_followed(to: str) -> None:
    with redirecting(to) as folder:
        for read in reads_of(folder):
            with pytest.raises(StorageError, match=r"cannot .* http"):
                read()


def test_a_redirect_is_followed_within_a_folder_and_on_demand_out_of_it() -> None:
    with redirecting("/photos/below/a.jpg?version=2") as folder:
        assert folder.read("a.jpg") == b"2"
        assert folder.size("a.jpg") == 1
        assert folder.folder("b").read("c.jpg") == b"2"
    with redirecting("/secret.jpg", follow_links=True) as folder:
        assert folder.read("a.jpg") == b"2"
    for to, says in [
        ("/photos/a.jpg", r"a.jpg: the server redirects it without end"),
        (
            "/secret.jpg?password=hidden",
            r"redirects to http://127.0.0.1:\d+/secret.jpg, .*not below .*--follow-links",
        ),
    ]:
        with redirecting(to) as folder, pytest.raises(StorageError, match=says):
            folder.read("a.jpg")


@pytest.mark.parametrize(
    ("kind", "page"),
    [
        ("text/html", b"<a" + b" " * (1 << 20)),
        ("text/html", b"<a " * (1 << 20)),
        ("text/html", b"<a href=" * (1 << 19)),
        ("text/html; charset=punycode", b"a" * (1 << 20) + b"-" + b"b" * (1 << 20)),
        ("text/html; charset=nobody-knows", b""),
        ("text/html; charset=zlib", b""),
    ],
    ids=["spaces", "tags", "links", "punycode", "unknown", "binary"],
)
def test_links_are_found_in_linear_time_whatever_the_page_is(kind: str, page: bytes) -> None:
    page = b'<a href="1.jpg">1.jpg</a>' + page
    with serving(about={"Content-Type": kind}, page=page) as folder:
        assert folder.names() == ["1.jpg"]


def test_links_are_those_of_files_below_their_page_unescaped_by_their_own_quotes() -> None:
    links = ["?C=N;O=D", "/", "../", "#top", "1.jpg", "cat/", "..%2F..%2Fsecret.jpg", "%2e%2e/",
             "%2e%2e%2fother/", "%2Fetc%2Fpasswd"]  # fmt: skip
    page = "".join(f'<a href="{link}">{link}</a>' for link in links)
    page += """<a href="it's.jpg"><A class="x"
        HREF='a&amp;b.jpg'><a href="&#34;c&#34;.jpg"><a title="" href="d e.jpg">"""
    left_out: list[str] = []
    with serving(page=page.encode()) as folder:
        right = ['"c".jpg', "1.jpg", "a&b.jpg", "cat", "d e.jpg", "it's.jpg"]
        assert folder.names() == right
        with contextlib.suppress(StorageError):  # pages that list themselves have no end
            list(folder.walk(lambda name, reason: left_out.append(name)))
        assert {"..", "../../secret.jpg", "../other", "/etc/passwd"} <= set(left_out)
        for name in ("..", "../../secret.jpg", "../other", "/etc/passwd"):
            with pytest.raises(StorageError, match="is no name below"):
                folder.read(name)


@pytest.mark.parametrize("how", [ENDLESS_ZEROS, ENDLESS_PAGE], ids=["zeros", "page"])
def test_of_what_has_no_end_no_more_is_read_than_was_asked_for_or_a_limit_allows(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_services, "MOST_PAGE", 1 << 20)
    monkeypatch.setattr("precache.storage.base.MOST_DOCUMENT", 1 << 20)
    with serving(**how) as folder:
        asked = [("a.bin", 0, 10), ("b.bin", 1000, 10), ("c.bin", 5, 0)]
        assert [len(required(part)) for part in folder.read_ranges(asked)] == [10, 10, 0]
        assert len(required(*folder.read_many(["a.bin"], [100]))) == 101
        assert len(folder.read_first("a.json", 5)) == 5
        with pytest.raises(StorageError, match=r"a.json: it has more than the 1,048,576 bytes"):
            folder.get("a.json")
        with pytest.raises(StorageError, match=r"cannot list http.*/photos: .* than 1,048,576 b"):
            list(folder.walk())


class _SilentBelow(_Answer):
    """Each page has two folders, and that of the first does not come before the test is over."""

    over: threading.Event
    page = b'<a href="a/"><a href="b/"><a href="x.jpg">'

    def do_GET(self) -> None:
        if self.path.rstrip("/").endswith("/a"):
            self.over.wait()
        with contextlib.suppress(OSError):
            super().do_GET()


def test_who_leaves_a_listing_does_not_wait_for_its_server() -> None:
    over = threading.Event()
    with serving(_SilentBelow, over=over) as folder:
        with contextlib.closing(folder.walk()) as walk:  # type: ignore[type-var]  # a generator
            assert [next(walk).name, next(walk).name] == ["x.jpg", "b/x.jpg"]
        over.set()


def test_photos_and_stores_behind_https_are_those_of_the_disk(
    https: str, certificate: Certificate, served: Path, tmp_path: Path
) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate.certificate))
    options: dict[str, Any] = {"storage_options": {"ssl": trusting}}
    build: dict[str, Any] = {"address": "serial", "shard_samples": 4, **options}
    right = pixels(served / "store")
    result = precache.build(f"{https}/photos", tmp_path / "store", RECIPE, **build)
    assert (result.samples, result.failed, result.classes) == (12, 0, ("cat", "dog", "eel"))
    again = precache.build(f"{https}/photos", tmp_path / "store", RECIPE, **build)
    assert again.shards_skipped == again.shards == 3
    assert_same(pixels(tmp_path / "store"), right)
    for more in ({}, {"cache": tmp_path / "cache"}):
        assert_same(pixels(f"{https}/store", **options, **more), right)
    pulled = precache.pull(f"{https}/store", tmp_path / "here", **options)
    assert contents(Path(pulled.path)) == contents(served / "store" / pulled.version)


def test_keys_and_classes_are_those_of_the_files(tmp_path: Path) -> None:
    names = ["grand chat/1 %20.jpg", "grand chat/2#a?b=c.jpg", "Kätzchen/3&4+5.jpg", "a%b/'6'.jpg"]
    for number, name in enumerate(names):
        write(tmp_path / "photos" / name, encoded(cut(number, (120, 90))))
    precache.build(tmp_path / "photos", tmp_path / "local", RECIPE, address="serial")
    with web_server(tmp_path) as url:
        folder = open_folder(f"{url}/photos")
        assert folder.names() == ["Kätzchen", "a%b", "grand chat"]
        assert folder.names("a%b") == ["'6'.jpg"]
        assert folder.folder("grand chat").name == "grand chat"
        assert folder.folder("grand chat").read("2#a?b=c.jpg") == folder.read(names[1])
        result = precache.build(f"{url}/photos", tmp_path / "web", RECIPE, address="serial")
    assert result.classes == ("Kätzchen", "a%b", "grand chat")
    assert_same(pixels(tmp_path / "web"), pixels(tmp_path / "local"))


@pytest.mark.parametrize("cached", [True, False])
def test_a_server_without_ranges_is_trained_from_with_a_warning(
    cached: bool, served: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"cache": tmp_path / "cache"} if cached else {}
    with web_server(served, ranges=False) as url:
        assert_same(pixels(f"{url}/store", **options), pixels(served / "store"))
        assert precache.verify(f"{url}/store").ok
    server = urlsplit(url).netloc  # another test's listing, which it left, may be trying its own
    [said] = [r.message for r in caplog.records if server in r.message]
    assert said.startswith(f"{server} sends whole objects where parts are asked for")


class _Parts(_Answer):
    """Answers with a part that begins at `start`, compressed for whoever takes it so, or said to be
    for all."""

    status = 206
    start = 5
    encoding = ""
    for_all = False

    def do_GET(self) -> None:
        taken = bool(self.encoding) and self.encoding in self.headers["Accept-Encoding"]
        self.page = b"\x1f\x8b" if taken else b"56"
        self.about = {"Content-Range": f"bytes {self.start}-{self.start + 1}/100"}
        self.about |= {"Content-Encoding": self.encoding} if taken or self.for_all else {}
        super().do_GET()


@pytest.mark.parametrize(
    ("how", "is_right"),
    [
        ({}, True),
        ({"encoding": "gzip"}, True),
        ({"encoding": "gzip", "for_all": True}, False),
        ({"encoding": "base64", "for_all": True}, True),  # metadata of an upload
        ({"start": 0}, False),
    ],
)
def test_a_part_is_the_one_that_was_asked_for(how: dict[str, Any], is_right: bool) -> None:
    with serving(_Parts, **how) as folder:
        [read] = folder.read_ranges([("a.tar", 5, 2)])
    assert read == b"56" if is_right else "sent another part" in str(read)


def test_a_certificate_that_is_not_trusted_is_named_at_once(
    https: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retried: list[object] = []
    monkeypatch.setattr(retries, "pause", lambda _, error: retried.append(error) or 0.0)
    said = r": Cannot connect .*self-signed certificate.*; if it is to be trusted, .*SSL_CERT_FILE"
    with pytest.raises(StorageError, match=rf"cannot read {https}/store/zarr\.json{said}"):
        precache.open(f"{https}/store")
    with pytest.raises(StorageError, match=rf"cannot look at {https}/photos{said}"):
        precache.build(f"{https}/photos", tmp_path / "store", RECIPE, address="serial")
    found, *_ = open_folder(f"{https}/store").read_many(["a"], [1])
    assert isinstance(found, StorageError)
    assert not [error for error in retried if urlsplit(https).netloc in str(error)]


def test_a_certificate_that_the_environment_names_is_trusted(
    https: str, certificate: Certificate
) -> None:
    line = [sys.executable, "-m", "precache", "verify", f"{https}/store"]
    environment = {**os.environ, "SSL_CERT_FILE": str(certificate.certificate)}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
