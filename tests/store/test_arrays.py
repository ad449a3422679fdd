"""Documents of the arrays of a version."""

import pytest

from precache.errors import StoreError
from precache.store.arrays import parse_json
from tests.conftest import BuiltStore


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"1" * 5000, b"[" * 100_000, b'{"a":' * 50_000]
)
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="is not"):
        parse_json(data, "group/zarr.json")


def test_every_array_of_a_version_has_a_document(store: BuiltStore) -> None:
    documents = sorted(store.version_folder.rglob("zarr.json"))
    names = {path.parent.relative_to(store.version_folder).as_posix() for path in documents}
    groups = {".", "shards", "_checks", "_sums", "rows"}
    columns = {f"rows/{name}" for name in ("size", "mtime_ns", "etag", "removed", "content")}
    small = {"label", "valid", "key", "holes", "_spare", *columns}
    assert names == groups | small | {"image", "shards/image", "_checks/image", "_sums/image"}
    kinds = [parse_json(path.read_bytes(), str(path))["node_type"] for path in documents]
    assert kinds.count("array") == len(names - groups)
