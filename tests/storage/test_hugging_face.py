"""``hf://``: files of a repository, by huggingface_hub, from a server that answers as the hub."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from precache.errors import StorageError
from precache.storage.open import open_folder
from precache_workers.sources.kinds import open_source
from tests.support.building import write_jpegs
from tests.support.containers import write_parquet
from tests.support.servers import FileHandler, answering
from tests.support.source_contract import check_source

REPOSITORY = "datasets/org/photos"


class Hub(FileHandler):
    """The requests that HfFileSystem makes to read a repository of data sets."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        _, tree, below = path.partition(f"/api/{REPOSITORY}/tree/main")
        if path in (f"/api/{REPOSITORY}", f"/api/{REPOSITORY}/revision/main"):
            self.answer({"id": "org/photos", "sha": "1" * 40, "siblings": []})
        elif tree:
            place = Path(self.directory, below.strip("/"))
            files = sorted(place.iterdir()) if place.is_dir() else []
            self.answer([self.described(file) for file in files], 200 if files else 404)
        else:
            self.path = path.removeprefix(f"/{REPOSITORY}/resolve/main")
            super().do_HEAD() if self.command == "HEAD" else super().do_GET()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers["Content-Type"].startswith("application/json"):
            paths = json.loads(body)["paths"]
        else:
            paths = [unquote(part[6:]) for part in body.split("&") if part.startswith("paths=")]
        files = [Path(self.directory, path) for path in paths]
        self.answer([self.described(file) for file in files if file.exists()])

    def described(self, file: Path) -> dict[str, Any]:
        path = file.relative_to(self.directory).as_posix()
        if file.is_dir():
            return {"type": "directory", "path": path, "oid": "2" * 40}
        return {"type": "file", "path": path, "oid": "3" * 40, "size": file.stat().st_size}

    def end_headers(self) -> None:
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("X-Error-Code", "EntryNotFound")  # who fails looks at it alone
        self.send_header("ETag", '"3"')
        super().end_headers()

    def answer(self, document: Any, status: int = 200) -> None:
        self.send(status, json.dumps(document).encode(), {"Content-Type": "application/json"})


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folder of a repository, and the options to read it."""
    folder = tmp_path / "repository"
    (folder / "data").mkdir(parents=True)
    with answering(partial(Hub, directory=str(folder))) as url:
        yield folder, {"endpoint": url, "token": False}


def test_parquet_files_of_a_repository_are_a_source(
    hub: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, options = hub
    write_jpegs(tmp_path / "photos", 30)
    write_parquet(tmp_path / "photos", folder / "data")
    uri = f"hf://{REPOSITORY}/data/train-*.parquet"
    listing = check_source(open_source(uri, options))
    local = open_source(str(folder / "data/train-*.parquet")).list(lambda count: None)
    assert list(listing.table.keys) == list(local.table.keys)
    assert listing.table.classes == local.table.classes
    assert all(listing.table.etags)


def test_repositories_are_only_read(hub: tuple[Path, dict[str, Any]]) -> None:
    folder = open_folder(f"hf://{REPOSITORY}", hub[1])
    with pytest.raises(StorageError, match=r"cannot write .*: hf:// is for reading"):
        folder.put("a", [b"x"])
    with pytest.raises(StorageError, match=r"cannot remove .*: hf:// is for reading"):
        folder.remove("a")
