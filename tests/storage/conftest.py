"""Folders and servers of each kind: disk, memory, S3, Google, Azure, the web."""

import asyncio
import http.client
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pytest

import precache
from precache.storage import retries
from precache.storage.base import Folder, required
from precache.storage.local import LocalFolder
from precache.storage.open import open_folder
from tests.support.building import write_jpegs
from tests.support.servers import Fault, FaultProxy, web_server

SERVERS = {"s3": "s3", "gs": "gcs", "az": "azurite"}
"""Protocol -> the fixture of its server."""

numbers = itertools.count()
"""Names of folders that no other test has."""


@pytest.fixture(params=["disk", "memory", *SERVERS])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """An empty folder of each kind that can be written to."""
    if request.param == "disk":
        return LocalFolder(tmp_path / "root")
    if request.param == "memory":
        return open_folder(f"memory://test/{next(numbers)}")
    server = request.getfixturevalue(SERVERS[request.param])
    return open_folder(f"{request.param}://bucket/{next(numbers)}", server.options())


RECIPE = precache.Recipe.image(resize=64, crop=56)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with twelve photographs, and a store of them in three shards."""
    root = tmp_path_factory.mktemp("served")
    write_jpegs(root / "photos", 12, (120, 90))
    precache.build(root / "photos", root / "store", RECIPE, address="serial", shard_samples=4)
    return root


@dataclass(frozen=True)
class Service:
    """Where objects are, straight and through a proxy: URLs, each with its storage options."""

    url: str
    options: dict[str, Any]
    faulty: str
    faulty_options: dict[str, Any]
    proxy: FaultProxy
    server: Any
    files: Path | None = None

    @property
    def protocol(self) -> str:
        return self.url.partition(":")[0]

    @property
    def straight(self) -> Folder:
        """The folder, past the proxy; onto the web, where nobody can write, from the disk."""
        return open_folder(self.files or self.url, None if self.files else self.options)

    @property
    def behind(self) -> Folder:
        """The folder behind the proxy."""
        return open_folder(self.faulty, self.faulty_options)

    def failing(self, faults: list[Fault], act: Callable[[], Any]) -> Any:
        """What an action returns whose first requests fail."""
        left = faults[::-1]
        self.proxy.choose = lambda method, path: left.pop() if left else None
        found = act()
        assert left == []
        return found

    def push(self, store: Path, name: str) -> str:
        """A copy of a store; its name in `url` and `faulty`."""
        options = None if self.files else self.options
        precache.pull(store, f"{self.files or self.url}/{name}", storage_options=options)
        return name


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a web server, and the folder of its files."""
    root = tmp_path_factory.mktemp("web")
    with web_server(root) as url:
        yield url, root


@pytest.fixture(params=[*SERVERS, "http"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """An empty folder, with pauses too short to wait for, the libraries' own included."""
    kind, place = request.param, f"bucket/service-{next(numbers)}"
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    if kind == "http":
        url, root = request.getfixturevalue("web")
        proxy = FaultProxy(urlsplit(url).port or 0)
        behind = f"http://127.0.0.1:{proxy.port}/{place}"
        found = Service(f"{url}/{place}", {}, behind, {}, proxy, None, root / place)
    else:
        server = request.getfixturevalue(SERVERS[kind])
        if kind == "gs":
            at_once = SimpleNamespace(sleep=lambda seconds: asyncio.sleep(0))
            monkeypatch.setattr("gcsfs.retry.asyncio", at_once)
        proxy, url = FaultProxy(server.port), f"{kind}://{place}"
        options = server.options(), server.options(proxy.port)
        found = Service(url, options[0], url, options[1], proxy, server)
    yield found
    proxy.stop()
    if kind in ("gs", "http"):
        fsspec.get_filesystem_class(kind).clear_instance_cache()


def actions(folder: Folder, name: str) -> list[Callable[[], object]]:
    """All that can be done to one name."""
    return [
        lambda: folder.read(name),
        lambda: required(*folder.read_many([name], [-1])),
        lambda: required(*folder.read_many([name], [1])),
        lambda: required(*folder.read_ranges([(name, 0, 1)])),
        lambda: folder.get(name),
        lambda: folder.read_first(name, 1),
        lambda: folder.size(name),
        lambda: folder.exists(name),
        lambda: folder.names(name),
        lambda: folder.sizes(name),
        lambda: folder.folder(name).remove(""),
        lambda: folder.put(name, [b"new"]),
        lambda: folder.create(name, [b"new"]),
        lambda: folder.copy(name, folder, "own"),
        lambda: folder.copy(name, folder, "own", create=True),
        lambda: folder.copy("copied", folder, name),
        lambda: folder.remove(name),
    ]


def only(*protocols: str) -> pytest.MarkDecorator:
    """Take the `service` of these protocols alone."""
    return pytest.mark.parametrize("service", protocols, indirect=True)


def put_raw(server: Any, key: str, data: bytes = b"1", **headers: str) -> None:
    """An object of the bucket, past all libraries that have an opinion on keys."""
    if hasattr(server, "insert"):  # Google's
        server.insert("bucket", key, data, create=False)
    elif hasattr(server, "container"):  # Azure's
        with server.container("bucket") as container:
            container.upload_blob(key, data, overwrite=True, metadata=headers)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("PUT", f"/bucket/{key}", data, named)
        assert connection.getresponse().status == 200
        connection.close()
