"""Opening stores and their versions; what is none is refused in words."""

import hashlib
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precache
from precache.errors import FormatError, GoneError, StoreError, UsageError
from precache.maintenance.location import open_for_writing
from precache.recipe.recipe import RESERVED
from precache.storage.local import LocalFolder
from precache.storage.open import open_folder
from precache.storage.remote import RemoteFolder
from precache.store.commit_log import read_log, record_removal
from precache.store.json_documents import FORMAT
from precache.store.open import split_uri
from precache.store.tree import SPARE_COPY
from tests.conftest import BuiltStore
from tests.support.building import append_commit
from tests.support.building import version_name as _id
from tests.support.forging import edit_root
from tests.support.servers import FaultProxy, S3Server


@pytest.fixture(scope="module")
def two_versions(photos: Path, make_store: Callable[..., BuiltStore]) -> BuiltStore:
    """A store whose first version is `raw`, and whose current one is `zstd`."""
    store = make_store(photos, precache.Recipe.image(codec="raw"))
    precache.build(photos, store.path, precache.Recipe.image(codec="zstd"), address="serial")
    return store


def test_a_version_is_named_by_a_prefix_its_folder_or_a_uri(
    two_versions: BuiltStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last commit is current, though a version was committed before."""
    path, version = two_versions.path, two_versions.result.version
    assert precache.open(path).fields["image"].codec == "zstd"
    monkeypatch.chdir(path.parent)
    odd = shutil.copytree(path, tmp_path / "photos@home")
    assert split_uri(odd) == (str(odd), None)
    append_commit(LocalFolder(odd), version)
    for uri in (
        *(f"{path}@{version[:length]}" for length in (3, 8, 32)),
        two_versions.result.path,
        f"file://{path}@{version}",
        f"{path.name}@{version}",
        odd,
        f"{odd}@{version[:6]}",
    ):
        assert precache.open(uri).id == version


@pytest.mark.parametrize(
    "prefix", ["", "z", "0123456789abcdef", "A", "f" * 65, "../outside", "..", "/", ".", "commits"]
)
def test_a_prefix_of_no_version_is_refused_with_those_there_are(
    two_versions: BuiltStore, prefix: str
) -> None:
    outside = two_versions.path.parent / "outside"
    if not outside.exists():
        shutil.copytree(two_versions.result.path, outside)
    with pytest.raises(StoreError) as caught:
        precache.open(f"{two_versions.path}@{prefix}")
    if "/" in prefix:
        assert "there is no store at" in str(caught.value)
    else:
        assert f"'{prefix}' fits no version of " in str(caught.value)
        assert two_versions.result.version[:12] in str(caught.value)


def test_a_generation_of_a_version_is_named_by_its_number(empty: LocalFolder) -> None:
    """By the id alone if there is only one."""
    one, other = _id("ab"), _id("ab")[:-1] + "12"
    for version in (one, other):
        append_commit(empty, version)
        empty.put(f"{version}/valid/c/0", [b"x"])
    with pytest.raises(StoreError, match="'ab' fits more than one version") as caught:
        precache.open(f"{empty.root}@ab")
    assert str(caught.value).endswith(f"it has {other[:12]}.12, {one[:12]}")
    for name in (other, "ab.12", other[:12] + ".12"):
        with pytest.raises(GoneError, match=re.escape(other)):
            precache.open(f"{empty.root}@{name}")
    record_removal(empty, [one])
    with pytest.raises(GoneError, match=re.escape(other)):
        precache.open(f"{empty.root}@ab")


GROUP = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
NO_STORES: dict[str, tuple[dict[str, bytes], str, str]] = {
    "nothing": ({}, "store", r"there is no store at .*store; build one"),
    "a folder": ({"notes.txt": b""}, "store", "is not a store: it has no commits"),
    "a file": ({"notes.txt": b""}, "store/notes.txt", "is not a store"),
    "a group": ({"zarr.json": GROUP}, "store", r"name its arrays.*fields=\{'image': 'path/in/gr"),
    "begun": ({f"{_id('a')}/_build/build.json": b"{}"}, "store", "a build was started .* the same"),
}


@pytest.mark.parametrize("case", NO_STORES)
def test_what_is_no_store_is_refused_with_what_to_do(case: str, empty: LocalFolder) -> None:
    files, name, words = NO_STORES[case]
    for file, data in files.items():
        empty.put(file, [data])
    for use in (precache.open, precache.info, precache.verify):
        with pytest.raises(StoreError, match=f"(?s){words}"):
            use(empty.root.parent / name)


def test_a_version_that_is_begun_is_not_seen_and_one_that_is_gone_is_said_to_be(
    own: BuiltStore,
) -> None:
    (own.path / _id("abc") / "_build").mkdir(parents=True)
    assert precache.open(own.path).id == own.result.version
    with pytest.raises(StoreError, match="'abc' fits no version"):
        precache.open(f"{own.path}@abc")
    shutil.rmtree(own.version_folder)
    with pytest.raises(GoneError, match=f"{own.result.version} is gone"):
        precache.open(own.path)


def test_a_prefix_that_is_no_store_is_refused_after_a_few_requests(
    s3: S3Server, proxy: FaultProxy
) -> None:
    uri, options = "s3://bucket/photos", s3.options(proxy.port)
    folder = open_folder(uri, s3.options())
    digests = [hashlib.md5(bytes([number])).hexdigest() for number in range(30)]
    for name in ("cat", "dog", *digests):
        folder.put(f"{name}/1.jpg", [b"photo"])
    with pytest.raises(StoreError, match="photos is not a store: it has no commits; give the fold"):
        precache.info(uri, options)
    asked = proxy.seen.total()
    with pytest.raises(UsageError, match=r"photos is not a store, and holds other files \(0"):
        open_for_writing(uri, "", options)
    assert asked < 25
    assert proxy.seen.total() - asked < 30
    begun = open_for_writing("s3://bucket/begun", uri, options)
    begun.put(f"{_id('a')}/_build/build.json", [b"{}"])
    assert open_for_writing("s3://bucket/begun", "", options) == begun


Change = Callable[[dict[str, Any]], object]


def image(**changes: Any) -> Change:
    """Change the field, which then has no statistics, and may have shapes of its own."""
    shapes = {"image.shape/c/0/0": [1, "0" * 32]}
    return lambda own: (
        own["fields"]["image"].update(changes),
        own["objects"].update(shapes),
        own.update(mean={}, std={}),
    )


def named(name: str) -> Change:
    return lambda own: own["fields"].update({name: own["fields"]["image"]})


NAMES = (*sorted(RESERVED), "label.0", "_sums", "a b", "image.x", "../x")
NO_NAME = (
    "zarr.json is damaged or forged: .*a field cannot be called '{}.*; run the same precache build"
)
DAMAGED = "zarr.json is damaged or forged"
FORGED: dict[str, tuple[Change, str]] = {
    **{
        f"a field {name!r}": (named(name), NO_NAME.format(re.escape(name.removesuffix(".0"))))
        for name in NAMES
    },
    "a field '../x' of the recipe": (
        lambda own: own["recipe"]["fields"].update({"../x": own["recipe"]["fields"]["image"]}),
        NO_NAME.format(r"\.\./x"),
    ),
    "rows of words": (lambda own: own.update(rows="many"), DAMAGED),
    "rows below none": (lambda own: own.update(rows=-5), DAMAGED),
    "more rows than objects": (lambda own: own.update(rows=2**20 + 1), DAMAGED),
    "a trillion shards": (lambda own: own.update(rows=10**12, rows_per_shard=1), DAMAGED),
    "a trillion rows in one": (lambda own: own.update(rows=10**12, rows_per_shard=10**12), DAMAGED),
    "as many rows as numbers count": (lambda own: own.update(rows=2**63 - 1), DAMAGED),
    "elsewhere": (lambda own: own["objects"].update({"../x/zarr.json": [1, "0" * 32]}), DAMAGED),
    "digests that are none": (lambda own: own["objects"].update({"label/c/0": [1, "x"]}), DAMAGED),
    "labels that none has": (lambda own: own["objects"].pop("label/c/0"), DAMAGED),
    "no rows": (lambda own: own.pop("rows"), DAMAGED),
    "version of another kind": (lambda own: own.update(version=[1]), DAMAGED),
    "fields of another kind": (lambda own: own.update(fields=7), DAMAGED),
    "field without a shape": (lambda own: own["fields"]["image"].pop("shape"), DAMAGED),
    "field that is not there": (named("mask"), DAMAGED),
    "means of no array": (lambda own: own["mean"].update({"image.x": [1.0] * 3}), DAMAGED),
    "means of other channels": (lambda own: own["std"].update(image=[1.0]), DAMAGED),
    "no such codec": (image(codec="gzip"), "zarr.json.*codec 'gzip'; there are raw, zstd"),
    "filtered floats": (image(codec="image", dtype="float32"), "zarr.json.*no uint8 images"),
    "filtered labels": (image(codec="image", shape=[5]), "zarr.json.*no uint8 images"),
    "files of one shape": (image(codec="jpeg"), "zarr.json.*stores ragged rows alone"),
    "half colours of one shape": (image(codec="raw420"), "zarr.json.*stores ragged rows alone"),
    "rows of nothing": (image(shape=[3, 0, 8]), r"zarr.json.*rows are \(3, 0, 8\)"),
    "ragged rows without axes": (image(shape=[], ragged=True), r"zarr.json.*rows are \(\)"),
    "more bytes than numbers count": (
        image(codec="raw", shape=[2**62, 2]),
        "zarr.json.*bytes; precache",
    ),
    "more chunks than any shard has": (
        lambda own: own.update(rows_per_shard=2**31 + 1),
        "zarr.json.*chunks in each shard",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_attributes_are_a_store_error_at_opening(case: str, own: BuiltStore) -> None:
    change, words = FORGED[case]
    edit_root(own.version_folder, change)
    with pytest.raises(StoreError, match=words):
        precache.open(own.path)


@pytest.mark.parametrize("number", [FORMAT + 1, FORMAT - 1, 1, 0, None, "4", [4]])
def test_another_format_is_damage_if_the_copy_of_the_root_has_this_one(
    number: Any, own: BuiltStore
) -> None:
    edit_root(own.version_folder, lambda root: root.update(format=number))
    with pytest.raises(StoreError, match=r"zarr.json is damaged.*run the same precache build"):
        precache.open(own.path)
    (own.version_folder / SPARE_COPY).unlink()
    with pytest.raises(FormatError, match=rf"store format .* reads format {FORMAT} alone; read it"):
        precache.open(own.path)


def test_a_store_is_opened_in_four_round_trips_however_long_its_log_is(
    image_store: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Methods of folders are counted, each a round trip or one beside another's."""
    far, asked = "memory://ahead", list[str]()
    precache.pull(image_store.path, far)

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(RemoteFolder, name)

        def call(own: RemoteFolder, *given: Any) -> Any:
            if given[0]:
                asked.append(f"{name} {threading.current_thread().name.partition('_')[0]}")
            return real(own, *given)

        return call

    for name in ("names", "read_many"):
        monkeypatch.setattr(RemoteFolder, name, counted(name))
    version, folder = precache.open(far), open_folder(far)
    assert precache.open(f"{far}/{version.id}").labels.tolist() == version.labels.tolist()
    [entry] = read_log(folder).entries
    for number in range(2, 30):
        folder.put(f"commits/{number:06d}.json", [entry.with_(number=number).to_json()])
    folder.put("commits/000007.json", [b"nonsense"])
    asked.clear()
    with precache.Loader(far, 4, device="cpu") as loader:
        here, there = "MainThread", "precache-open"
        log = [f"names {there}", f"read_many {there}"]  # beside the look for a version right there
        assert sorted(asked[:3]) == sorted([*log, f"read_many {here}"])
        assert asked[3:] == [f"read_many {here}"] * 2
        assert sum(len(batch["row"]) for batch in loader) == 21
    with pytest.raises(StoreError, match="000007"):
        precache.versions(far)
