"""Stores, their commit log and their versions; what is none of these is refused in words."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import precache
from precache import smallarrays
from precache import store as store_module
from precache.commits import append_entry, read_commits, source_of
from precache.errors import DamageError, PrecacheError, StoreError, UsageError
from precache.localdisk import LocalFolder
from precache.metadata import parse_array, parse_json
from precache.smallarrays import decode_strings, read_small, small_array, string_array
from precache.store import open_version, split_uri
from tests.conftest import BuiltStore

CopyStore = Callable[[BuiltStore], BuiltStore]


def _id(*digits: str) -> str:
    return "".join(digits).ljust(32, "0")


# --- the commit log -----------------------------------------------------------------------------


@pytest.fixture
def empty(tmp_path: Path) -> LocalFolder:
    return LocalFolder(tmp_path / "store")


def _forge(store: LocalFolder, name: str, entry: Any) -> None:
    data = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
    store.put(f"commits/{name}", [data])


def test_a_log_names_each_version_after_its_parent(empty: LocalFolder) -> None:
    versions = [_id("a"), _id("b"), _id("a")]
    commits = [append_entry(empty, version) for version in versions]
    assert [c.number for c in commits] == [1, 2, 3]
    assert [c.version for c in commits] == versions
    assert [c.parent for c in commits] == [None, *versions[:-1]]
    assert read_commits(empty) == commits
    assert empty.names("commits") == ["000001.json", "000002.json", "000003.json"]


def test_committing_what_is_current_adds_nothing(empty: LocalFolder) -> None:
    first = append_entry(empty, _id("a"))
    assert append_entry(empty, _id("a")) == first
    assert len(read_commits(empty)) == 1


def test_what_is_current_and_built_from_elsewhere_is_noted_once(empty: LocalFolder) -> None:
    append_entry(empty, _id("a"), "/old")
    second = append_entry(empty, _id("b"), "/old")
    assert append_entry(empty, _id("b"), "/old") == second
    assert append_entry(empty, _id("b")) == second
    moved = append_entry(empty, _id("b"), "/new")
    assert moved == dataclasses.replace(second, number=3, source="/new")
    assert append_entry(empty, _id("b"), "/new") == moved
    assert source_of(read_commits(empty), _id("b")) == "/new"
    assert append_entry(empty, _id("a")).parent == _id("b")


COMMITTER = """
import sys, pathlib
from precache.localdisk import LocalFolder
from precache.commits import append_entry
store = LocalFolder(pathlib.Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(8):
    append_entry(store, f"{int(sys.argv[2]):x}{number:x}".ljust(32, "0"))
"""


def _race(code: str, arguments: Sequence[Sequence[str]]) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, *each],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for each in arguments
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        racer.communicate(timeout=60)
        assert racer.returncode == 0


def test_processes_that_commit_at_once_all_get_a_number(empty: LocalFolder) -> None:
    _race(COMMITTER, [[str(empty.root), str(racer)] for racer in (10, 11, 12)])
    log = read_commits(empty)
    assert [commit.number for commit in log] == list(range(1, 25))
    assert len({commit.version for commit in log}) == 24
    assert [c.parent for c in log] == [None, *(c.version for c in log[:-1])]
    left = [path.name for path in empty.root.rglob("*") if path.is_file()]
    assert sorted(left) == empty.names("commits")


def test_the_highest_number_is_current_however_many_digits_it_has(empty: LocalFolder) -> None:
    for number, digit in [(999_999, "a"), (1_000_000, "b"), (7, "c")]:
        _forge(empty, f"{number:06d}.json", {"version": _id(digit), "parent": None, "time": 0})
    assert read_commits(empty)[-1].version == _id("b")
    assert append_entry(empty, _id("b")).number == 1_000_000


def test_files_that_are_no_commits_are_passed_over(empty: LocalFolder) -> None:
    append_entry(empty, _id("a"))
    for name in (".000002.json.abc.tmp", "README", "x.json", "000002.json.bak", "²³.json"):
        _forge(empty, name, b"junk")
    assert [commit.number for commit in read_commits(empty)] == [1]


FORGED_ENTRIES: dict[str, Any] = {
    "no JSON": b"{",
    "no object": [],
    "nothing": {},
    "no version": {"version": None, "time": 0},
    "number": {"version": 7, "time": 0},
    "short": {"version": "ab", "time": 0},
    "upper case": {"version": "A" * 32, "time": 0},
    "path upwards": {"version": "../" + "a" * 32, "time": 0},
    "absolute path": {"version": "/etc", "time": 0},
    "path and line end": {"version": "a" * 32 + "\n", "time": 0},
    "no time": {"version": "a" * 32},
    "time of words": {"version": "a" * 32, "time": "noon"},
}


@pytest.mark.parametrize("case", FORGED_ENTRIES)
def test_a_forged_commit_is_refused_by_name(case: str, empty: LocalFolder) -> None:
    _forge(empty, "000001.json", FORGED_ENTRIES[case])
    with pytest.raises(StoreError, match=r"commits/000001\.json"):
        precache.open(empty.root)


def test_no_prefix_leads_out_of_the_store(stores: dict[str, BuiltStore], copy_store: Any) -> None:
    store = copy_store(stores["raw"])
    outside = store.path.parent / "outside"
    shutil.copytree(store.version_folder, outside)
    for prefix in ("../outside", "..", "/", ".", "commits"):
        with pytest.raises(StoreError):
            precache.open(f"{store.path}@{prefix}")


# --- choosing a version -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_versions(photos: Path, make_store: Callable[..., BuiltStore]) -> BuiltStore:
    """A store whose first version is `raw`, and whose current one is `zstd`."""
    store = make_store(photos, precache.Pipeline.image(codec="raw"))
    precache.build(photos, store.path, precache.Pipeline.image(codec="zstd"), address="serial")
    return store


def test_the_last_commit_is_current(two_versions: BuiltStore) -> None:
    assert precache.open(two_versions.path).fields["image"].codec == "zstd"


@pytest.mark.parametrize("length", [3, 8, 32])
def test_a_prefix_picks_a_version(two_versions: BuiltStore, length: int) -> None:
    version = two_versions.result.version
    assert precache.open(f"{two_versions.path}@{version[:length]}").id == version


def test_the_folder_of_a_version_opens_too(two_versions: BuiltStore) -> None:
    assert precache.open(two_versions.result.path).id == two_versions.result.version


@pytest.mark.parametrize("prefix", ["", "z", "0123456789abcdef", "A", "f" * 65])
def test_a_prefix_of_no_version_is_refused_with_those_there_are(
    two_versions: BuiltStore, prefix: str
) -> None:
    with pytest.raises(StoreError, match=f"'{prefix}' fits no version of ") as caught:
        precache.open(f"{two_versions.path}@{prefix}")
    assert two_versions.result.version[:12] in str(caught.value)


def test_a_prefix_of_two_versions_is_refused(empty: LocalFolder) -> None:
    for version in (_id("ab1"), _id("ab2"), _id("c")):
        append_entry(empty, version)
    with pytest.raises(StoreError, match="'ab' fits more than one version") as caught:
        precache.open(f"{empty.root}@ab")
    assert _id("ab1")[:12] in str(caught.value)
    assert _id("ab2")[:12] in str(caught.value)


def test_a_version_that_was_committed_twice_is_one(
    two_versions: BuiltStore, tmp_path: Path
) -> None:
    copy = tmp_path / "twice"
    shutil.copytree(two_versions.path, copy)
    first = two_versions.result.version
    append_entry(LocalFolder(copy), first)
    assert precache.open(f"{copy}@{first[:6]}").id == precache.open(copy).id == first


def test_file_uris_and_paths_are_the_same_store(
    two_versions: BuiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = two_versions.result.version
    monkeypatch.chdir(two_versions.path.parent)
    for uri in (
        f"{two_versions.path}@{version}",
        f"file://{two_versions.path}@{version}",
        f"{two_versions.path.name}@{version}",
    ):
        assert precache.open(uri).id == version


def test_a_folder_with_an_at_sign_in_its_name_is_itself(
    two_versions: BuiltStore, tmp_path: Path
) -> None:
    odd = tmp_path / "photos@home"
    shutil.copytree(two_versions.path, odd)
    assert split_uri(odd) == (str(odd), None)
    current = precache.open(odd)
    assert precache.open(f"{odd}@{current.id[:6]}").id == current.id


# --- what is no store ---------------------------------------------------------------------------


def test_a_store_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no store at .*nowhere; build one"):
        precache.open(tmp_path / "nowhere")


def test_a_folder_that_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(StoreError, match="is not a store: it has no commits"):
        precache.open(tmp_path)


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(StoreError, match="is not a store"):
        precache.open(tmp_path / "notes.txt")


def test_a_group_of_other_software_asks_for_fields(tmp_path: Path) -> None:
    root = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    (tmp_path / "zarr.json").write_text(json.dumps(root))
    with pytest.raises(StoreError, match="precache did not write; name its arrays") as caught:
        precache.open(tmp_path)
    assert "fields={'image': 'path/in/group'}" in str(caught.value)


def test_a_build_that_was_only_begun_says_how_to_end_it(empty: LocalFolder) -> None:
    empty.put(f"{_id('a')}/_build/build.json", [b"{}"])
    with pytest.raises(StoreError, match="a build was started here: run the same"):
        precache.open(empty.root)


def test_a_version_begun_beside_a_current_one_is_not_seen(
    stores: dict[str, BuiltStore], copy_store: CopyStore
) -> None:
    store = copy_store(stores["raw"])
    (store.path / _id("abc") / "_build").mkdir(parents=True)
    assert precache.open(store.path).id == store.result.version
    with pytest.raises(StoreError, match="'abc' fits no version"):
        precache.open(f"{store.path}@abc")


def test_a_committed_version_that_is_gone_says_so(
    stores: dict[str, BuiltStore], copy_store: CopyStore
) -> None:
    store = copy_store(stores["raw"])
    shutil.rmtree(store.version_folder)
    with pytest.raises(StoreError, match=f"{store.result.version} is gone"):
        precache.open(store.path)


def test_another_protocol_is_refused() -> None:
    with pytest.raises(UsageError, match="nowhere:// is not supported"):
        precache.open("nowhere://bucket/store@3f2a")


def _edit(store: BuiltStore, change: Callable[[dict[str, Any]], object]) -> None:
    path = store.version_folder / "zarr.json"
    document = json.loads(path.read_bytes())
    change(document["attributes"]["precache"])
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("number", [3, 0, None, "1", [1]])
def test_another_format_asks_for_an_update(
    stores: dict[str, BuiltStore], copy_store: CopyStore, number: Any
) -> None:
    store = copy_store(stores["raw"])
    _edit(store, lambda own: own.update(format=number))
    with pytest.raises(StoreError, match=r"store format .* reads formats up to 2; update precache"):
        precache.open(store.path)


# --- forged metadata ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "root",
    [b"", b"[]", b"{}", b'{"attributes": null}', b'{"attributes": []}', b"[" * 100_000],
)
def test_a_broken_root_is_a_store_error(
    stores: dict[str, BuiltStore], copy_store: CopyStore, root: bytes
) -> None:
    store = copy_store(stores["raw"])
    (store.version_folder / "zarr.json").write_bytes(root)
    with pytest.raises(StoreError):
        precache.open(store.path)


FORGED_ATTRIBUTES: dict[str, Callable[[dict[str, Any]], object]] = {
    "rows of words": lambda own: own.update(rows="many"),
    "rows below none": lambda own: own.update(rows=-5),
    "more rows than there are": lambda own: own.update(rows=24),
    "fewer rows than there are": lambda own: own.update(rows=7),
    "no rows": lambda own: own.pop("rows"),
    "no version": lambda own: own.pop("version"),
    "version of another kind": lambda own: own.update(version=[1]),
    "no fields": lambda own: own.pop("fields"),
    "fields of another kind": lambda own: own.update(fields=7),
    "fields as a list": lambda own: own.update(fields=["image"]),
    "field of another kind": lambda own: own["fields"].update(image=None),
    "field without a shape": lambda own: own["fields"]["image"].pop("shape"),
    "field that is not there": lambda own: own["fields"].update(mask=own["fields"]["image"]),
    "field with a path": lambda own: own["fields"].update(
        {"../" + own["version"] + "/image": own["fields"].pop("image")}
    ),
}


@pytest.mark.parametrize("case", FORGED_ATTRIBUTES)
def test_forged_attributes_are_a_store_error_at_opening(
    case: str, stores: dict[str, BuiltStore], copy_store: CopyStore
) -> None:
    store = copy_store(stores["raw"])
    _edit(store, FORGED_ATTRIBUTES[case])
    with pytest.raises(StoreError):
        _ = precache.open(store.path).fields


SMALL_SHAPES = {"label": [24], "valid": [7], "shards/image": [2, 2], "key": [5]}


@pytest.mark.parametrize("name", SMALL_SHAPES)
@pytest.mark.parametrize("kind", ["another length", "another rank", "huge"])
def test_small_arrays_of_another_shape_end_in_an_error_of_ours(
    name: str, kind: str, stores: dict[str, BuiltStore], copy_store: CopyStore
) -> None:
    store = copy_store(stores["raw"])
    path = store.version_folder / name / "zarr.json"
    document = json.loads(path.read_bytes())
    shape = {
        "another length": SMALL_SHAPES[name],
        "another rank": [*document["shape"], 3],
        "huge": [2**50, *document["shape"][1:]],
    }[kind]
    document["shape"] = shape
    path.write_text(json.dumps(document))
    if name == "key":  # keys are laid out by the rows alone
        assert len(list(precache.open(store.path).keys)) == 23
        return
    with (
        pytest.raises(PrecacheError),
        precache.Loader(store.path, batch_size=4, shuffle=False) as loader,
    ):
        list(loader)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


@pytest.fixture(scope="module")
def forged(stores: dict[str, BuiltStore], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version's folder whose root may be rewritten."""
    path = tmp_path_factory.mktemp("forged") / "version"
    shutil.copytree(stores["raw"].version_folder, path)
    (path / "original.json").write_bytes((path / "zarr.json").read_bytes())
    return path


@settings(max_examples=300)
@given(data=st.data())
def test_a_root_changed_anywhere_opens_or_is_refused(data: st.DataObject, forged: Path) -> None:
    document = json.loads((forged / "original.json").read_bytes())
    places = list(_places(document))
    container, key = places[data.draw(st.integers(0, len(places) - 1))]
    container[key] = data.draw(JUNK)
    (forged / "zarr.json").write_text(json.dumps(document))
    with contextlib.suppress(PrecacheError):
        version = precache.open(forged)
        _ = (version.fields, version.classes, version.mean, version.std, repr(version))
        _ = (version.pipeline, version.valid, version.labels, version.holes)


# --- what a version says ------------------------------------------------------------------------


def test_a_version_tells_what_it_holds(store: BuiltStore) -> None:
    version = store.open()
    assert version.id == store.result.version
    assert version.path == store.result.path
    assert version.rows == 23
    assert version.classes == ("cat", "dog", "eel")
    assert version.pipeline == store.pipeline
    assert not version.foreign
    assert version.id[:8] in repr(version)
    field = version.fields["image"]
    assert (field.shape, field.dtype) == ((3, 112, 112), "uint8")
    # Validation fills in the codec.
    assert field.codec == store.pipeline.fields["image"].codec.name  # type: ignore[union-attr]
    assert field.raw_nbytes == 23 * 3 * 112 * 112
    assert field.stored_nbytes == sum(store.shard_path(n).stat().st_size for n in range(3))


def test_mean_and_deviation_are_those_of_the_valid_rows(store: BuiltStore) -> None:
    version = store.open()
    pixels = store.rows()[version.valid].astype(np.float64)
    np.testing.assert_allclose(version.mean["image"], pixels.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(version.std["image"], pixels.std((0, 2, 3)), rtol=1e-5)


def test_holes_have_a_key_and_a_reason_and_the_labels_their_class(store: BuiltStore) -> None:
    version = store.open()
    broken = {key for key in version.keys if Path(key).stem in ("0021", "0022")}
    assert {key for key, _ in version.holes.values()} == broken
    assert all(version.keys[row] == key for row, (key, _) in version.holes.items())
    assert all("not an image" in reason for _, reason in version.holes.values())
    assert version.hole_rows.tolist() == sorted(version.holes)
    assert np.flatnonzero(~version.valid).tolist() == sorted(version.holes)
    classes = [version.classes[label] for label in version.labels]
    assert classes == [Path(key).parent.name for key in version.keys]
    assert version.labels.dtype == np.int8


def test_keys_are_a_sequence_of_strings(stores: dict[str, BuiltStore]) -> None:
    keys = stores["raw"].open().keys
    everything = list(keys)
    names = {str(p.relative_to(stores["raw"].source)) for p in stores["raw"].source.rglob("*.png")}
    assert set(everything) == names
    assert len(keys) == len(everything) == 23
    assert all(type(key) is str for key in everything)
    assert keys[-1] == everything[-1]
    assert keys[np.int64(3)] == everything[3]
    assert keys[2:9:3] == everything[2:9:3]
    assert everything[5] in keys
    assert keys.index(everything[7]) == 7
    for index in (23, -24):
        with pytest.raises(IndexError):
            keys[index]


def test_reading_changes_nothing_in_a_store(
    stores: dict[str, BuiltStore], copy_store: CopyStore
) -> None:
    store = copy_store(stores["image"])

    def everything() -> dict[Path, tuple[int, int]]:
        paths = [store.path, *store.path.rglob("*")]
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}

    before = everything()
    with precache.Loader(store.path, batch_size=4) as loader:
        list(loader)
    version = precache.open(store.path)
    _ = (version.holes, list(version.keys), precache.CachedDataset(store.path)[0])
    assert everything() == before


DAMAGES: dict[str, Callable[[precache.Version], object]] = {
    "label/c/0": lambda version: version.labels,
    "valid/c/0": lambda version: version.valid,
    "key/c/0": lambda version: version.keys[0],
    "shards/image/c/0/0": lambda version: version.shard_table("image"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_of_a_small_array_names_its_file(
    name: str, stores: dict[str, BuiltStore], copy_store: CopyStore
) -> None:
    store = copy_store(stores["raw"])
    path = store.version_folder / name
    data = bytearray(path.read_bytes())
    for position in (len(data) // 2, len(data) - 1, 0):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(DamageError, match=name):
            DAMAGES[name](precache.open(store.path))
    for cut in (0, 3, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(DamageError, match=name):
            DAMAGES[name](precache.open(store.path))
    path.unlink()
    with pytest.raises(PrecacheError, match=name):
        DAMAGES[name](precache.open(store.path))


def test_damage_of_the_list_of_holes_names_its_file(
    stores: dict[str, BuiltStore], copy_store: CopyStore
) -> None:
    store = copy_store(stores["raw"])
    path = store.version_folder / "holes" / "c" / "0"
    for data in (b"{", b"[1]", b'{"x": 1}', b'{"1": null}', b'{"x": ["a", "b"]}'):
        path.write_bytes(data)
        with pytest.raises(PrecacheError, match=r"holes/c/0"):
            _ = precache.open(store.path).holes


# --- small arrays -------------------------------------------------------------------------------


def _written(tmp_path: Path, files: dict[str, bytes]) -> LocalFolder:
    folder = LocalFolder(tmp_path)
    for name, data in files.items():
        folder.put(f"x/{name}", [data])
    return folder


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 20])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float32"])
def test_small_arrays_round_trip_over_several_chunks(
    rows: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smallarrays, "ROWS_PER_CHUNK", 8)
    values = (np.arange(rows * 2).reshape(rows, 2) % 3).astype(dtype)
    folder = _written(tmp_path, small_array(values, ["row", "pair"]))
    array = parse_array(parse_json(folder.read("x/zarr.json"), "x"), "x")
    read = read_small(folder, {"x": array})["x"]
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read, values)
    assert len(folder.names("x/c")) == -(-rows // 8)


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_strings_round_trip_over_several_chunks(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smallarrays, "KEYS_PER_CHUNK", 4)
    monkeypatch.setattr(store_module, "KEYS_PER_CHUNK", 4)
    values = [f"cat/é {n}.jpg" for n in range(count)]
    files = string_array(values, "row")
    chunks = [files[f"c/{n}"] for n in range(len(files) - 1)]
    read = [text for chunk in chunks for text in decode_strings(chunk, "x")]
    assert read[:count] == values
    assert set(read[count:]) <= {""}


def test_keys_of_several_chunks_are_found(
    monkeypatch: pytest.MonkeyPatch, make_store: Callable[..., BuiltStore], photos: Path
) -> None:
    monkeypatch.setattr(smallarrays, "KEYS_PER_CHUNK", 4)
    monkeypatch.setattr(store_module, "KEYS_PER_CHUNK", 4)
    store = make_store(photos, keep_order=True)
    listing = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    assert list(store.open().keys) == listing
    assert store.open().keys[-1] == listing[-1]


def test_opening_costs_a_few_reads_however_many_shards_there_are(
    stores: dict[str, BuiltStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    read = LocalFolder.read
    monkeypatch.setattr(
        LocalFolder, "read", lambda folder, name: opened.append(name) or read(folder, name)
    )
    version = open_version(stores["raw"].path)
    _ = (version.labels, version.valid, version.shard_table("image"))
    assert len(opened) <= 10
    assert not any(name.startswith("image/c/") for name in opened)
    assert os.fspath(version.path)
