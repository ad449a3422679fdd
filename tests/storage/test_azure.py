"""The whole road over ``az://``, against Azurite, Microsoft's emulator.

It is found by the variable AZURITE, on the search path, or where `npm install --no-save azurite`
puts it.
"""

import base64
import re

import pytest

from precache.errors import StorageError
from precache.storage import object_store
from precache.storage.open import open_folder
from tests.storage.conftest import Service, actions, only, put_raw
from tests.support.servers import Azurite, status

WRONG_KEY = base64.b64encode(b"another key, which opens nothing").decode()


@only("az")
@pytest.mark.parametrize(
    ("marker", "metadata"),
    [
        ("cat", {"hdi_isfolder": "true"}),
        ("cat", {"Hdi_isfolder": "true"}),
        ("cat", {"is_directory": "true"}),
        ("cat/", {}),
        ("deep/cat/", {}),
    ],
)
@pytest.mark.parametrize("page", [1, 5000])
def test_folders_that_are_blobs_too_are_folders(
    page: int,
    marker: str,
    metadata: dict[str, str],
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where other names stand between a folder's two, and a page ends there."""
    monkeypatch.setitem(object_store.PAGE, "azure", page)
    place, folder = marker.rstrip("/"), service.straight
    names = [f"{place}-0.jpg", f"{place}/1.jpg", f"{place}/small/2.jpg"]
    for name in names:
        folder.put(name, [b"1"])
    put_raw(service.server, f"{folder.name}/{marker}", b"", **metadata)
    assert sorted(info.name for info in folder.walk()) == names
    below = folder.folder(place)
    assert (below.kind(), below.names()) == ("folder", ["1.jpg", "small"])
    beside = folder.folder(place.rpartition("/")[0])
    assert beside.names() == ["cat", "cat-0.jpg"]


@only("az")
def test_a_file_is_one_where_nothing_can_be_listed_below_it(service: Service) -> None:
    """As in accounts with hierarchical names, which refuse for good."""
    service.straight.put("a.tar", [b"1"])
    service.proxy.faults["GET", "/bucket"] = [status(409)] * 9
    assert service.behind.folder("a.tar").kind() == "file"
    assert service.proxy.requests("GET", "/bucket") == 1
    folder, marks = service.straight, {"hdi_isfolder": "true", "is_directory": "false"}
    put_raw(service.server, f"{folder.name}/a.tar", **marks)
    assert [info.name for info in folder.walk()] == ["a.tar"], "said to be no folder"


@pytest.mark.parametrize("key", [WRONG_KEY, "this-is-no-key-but-a-secret"])
def test_credentials_that_are_wrong_are_said_at_once(key: str, azurite: Azurite) -> None:
    folder = open_folder("az://bucket/x", azurite.options(key=key))
    for action in actions(folder, "a"):
        with pytest.raises(StorageError) as caught:
            action()
        said = str(caught.value)
        assert re.match(r"cannot (read|look at|list|write|remove) az://bucket/x/?\w*: ", said)
        assert said.endswith("; check the credentials and what they may do")
        assert "\n" not in said
        assert key not in said
