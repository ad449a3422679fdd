"""Forged objects, and what is no file, end in words for whoever reads them, and take no memory."""

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import zstd
from numcodecs.vlen import VLenUTF8

import precache
from precache.cli.main import main
from precache.errors import DamageError, PrecacheError, StorageError, StoreError
from precache.storage import base as folder
from tests.support.building import build_here, write, write_jpegs
from tests.support.forging import edit_root, little_memory, settle
from tests.support.mutations import places, small_names

RECIPE = precache.Recipe.image(resize=8, crop=8)
OPTIONS = {"shard_samples": 4}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source and a store of two versions of it; `RECIPE`'s is current."""
    root = tmp_path_factory.mktemp("forged")
    source = write_jpegs(root / "in", 12, (24, 24))
    write(source / "cat/broken.jpg", b"none")
    build_here(source, root / "store", precache.Recipe.image(resize=9, crop=8), OPTIONS)
    build_here(source, root / "store", RECIPE, OPTIONS)
    return root


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built / "store", tmp_path / "store")
    (tmp_path / "in").symlink_to(built / "in")
    return tmp_path / "store"


def version_of(store: Path) -> Path:
    return Path(precache.open(store).path)


def frame(*parts: bytes) -> bytes:
    return bytes(zstd.compress(b"".join(parts), 1, True))


def count(number: int) -> bytes:
    return number.to_bytes(4, "little")


BOMB = frame(bytes(1 << 28))
"""A frame of a few kilobytes."""


KEYS: dict[str, bytes] = {
    "none": frame(VLenUTF8().encode(np.array([], object))),
    "too few": frame(VLenUTF8().encode(np.array(["a"] * 3, object))),
    "as many as memory": frame(count(2**31 - 1), bytes(60)),
    "longer than there is": frame(count(13), count(2**31 - 1) * 20),
    "of a negative length": frame(count(13), count(2**32 - 1) * 20),
    "no text": frame(count(13), (count(1) + b"\xff") * 13),
    "a bomb": BOMB,
    "a bomb that says so": b"\x28\xb5\x2f\xfd\xe0" + (10**12).to_bytes(8, "little") + bytes(40),
    "of unknown size": b"\x28\xb5\x2f\xfd\x00" + bytes(40),
    "no frame": b"none",
    "nothing": b"",
}


def read_all(store: Path) -> None:
    with precache.Loader(store, 2, device="cpu") as loader:
        list(loader)


NO_HOLES = [
    b"{", b"[1]", b'{"x": 1}', b'{"1": null}', b'{"1": ["a", ["lost", ""]]}',
    b'{"-1": ["a", ["failed", ""]]}', b'{"9999999999999999999999": ["a", ["failed", ""]]}',
]  # fmt: skip
ANOTHER_SIZE = " is damaged: (a chunk does not decode: )?its frame is another size"
OBJECTS = {
    **{f"keys {case}": ("key/c/0", data, " is damaged: ") for case, data in KEYS.items()},
    **{f"holes {data!r}": ("holes/c/0", data, "") for data in NO_HOLES},
    **{
        f"{name} {case}": (name, KEYS[case], ANOTHER_SIZE)
        for name in ("label/c/0", "valid/c/0", "shards/image/c/0/0")
        for case in ("a bomb", "a bomb that says so")
    },
    "booleans": ("valid/c/0", frame(bytes([7]) * 13), " is damaged: .*neither true nor false"),
    "as many booleans as rows could be": ("valid/c/0", frame(bytes(1 << 20)), ANOTHER_SIZE),
}


READS: dict[str, Callable[[Path], object]] = {
    "key/c/0": lambda store: precache.open(store).keys[0],
    "holes/c/0": lambda store: precache.open(store).holes,
}


@pytest.mark.parametrize("case", OBJECTS)
def test_a_forged_small_object(case: str, store: Path) -> None:
    name, data, words = OBJECTS[case]
    version = version_of(store)
    (version / name).write_bytes(data)
    settle(version)
    error = StoreError if name == "holes/c/0" else DamageError
    with little_memory(), pytest.raises(error, match=f"{name}{words}"):
        READS.get(name, read_all)(store)


@pytest.mark.parametrize(
    "shape", [[3, 10**6, 10**6], [3, 2**31, 2**31], [10**13, 1, 1], [3, 1, 10**10], [3] * 40]
)
def test_rows_that_no_memory_holds(shape: list[int], store: Path) -> None:
    """A version that says consistently that its rows have such a shape."""

    def read_many(store: Path) -> None:
        precache.CachedDataset(store, access="pread").__getitems__(range(8))

    version = version_of(store)
    edit_root(version, lambda own: own["fields"]["image"].update(shape=shape))
    with little_memory():
        for use in (read_all, read_many):
            with pytest.raises((DamageError, StoreError), match=re.escape(str(version))):
                use(store)
        try:
            found = precache.verify(store)
        except (DamageError, StoreError) as error:
            assert str(version) in str(error)  # noqa: PT017 - or it is said in another way
        else:
            assert found.unchecked or not found.ok


def test_a_shard_larger_than_any_disk(store: Path) -> None:
    version, table = version_of(store), np.full((1, 3), 1 << 62, "<u8")
    (version / "shards/image/c/0/0").write_bytes(frame(table.tobytes()))
    settle(version)
    [damage] = precache.verify(store).damage
    assert damage.reason.endswith(f"where {1 << 62} were written")


def command(*arguments: str) -> Callable[[Path], object]:
    def run(store: Path) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main([each.format(store=store) for each in arguments])

    return run


def build_again(store: Path, recipe: precache.Recipe = RECIPE) -> None:
    build_here(store.parent / "in", store, recipe, OPTIONS)


USES: list[Callable[[Path], object]] = [
    read_all,
    precache.verify,
    lambda store: precache.gc(store, keep=2, older_than=0),
    lambda store: precache.plan(store.parent / "in", store, RECIPE, timing=False, address="serial"),
    command("info", "{store}"),
    command("ls", "{store}"),
    command("verify", "{store}"),
    command("use", "{store}@0"),
    build_again,
    lambda store: build_again(store, precache.Recipe.image(resize=8, codec="raw")),
]

HOSTILE: list[Any] = [
    None, True, 0, -1, 1, 2**31, 10**12, 2**63, 2**64, 2**70, 1e300, float("nan"), float("inf"),
    1.5, "", "x" * 100, "\0", "../..", [], {}, [0], [10**12], {"a": {}}, "1" * 5000,
]  # fmt: skip

BYTES = [
    b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 10**5, b'{"a":' * 10**5, b"1" * 5000,
    b'{"1": ' + b"9" * 6000 + b"}", b'{"shape": [1], "shape": [2]}', *KEYS.values(),
]  # fmt: skip


@pytest.fixture(scope="module")
def victim(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store beside its source, to be changed and used."""
    root = tmp_path_factory.mktemp("victim")
    shutil.copytree(built / "in", root / "in")
    return root / "store"


@given(data=st.data())
def test_whatever_is_forged_ends_in_words_for_whoever_reads_it(
    data: st.DataObject, built: Path, victim: Path
) -> None:
    shutil.rmtree(victim, ignore_errors=True)
    shutil.copytree(built / "store", victim)
    version = version_of(victim)
    names = ["zarr.json"] * 8 + small_names(version) + ["../commits/000002.json"]
    path = version / data.draw(st.sampled_from(names))
    if path.suffix == ".json" and data.draw(st.booleans()):
        document = json.loads(path.read_bytes())
        container, key = data.draw(st.sampled_from(list(places(document))))
        container[key] = data.draw(st.sampled_from(HOSTILE))
        path.write_text(json.dumps(document))
    else:
        path.write_bytes(data.draw(st.sampled_from(BYTES)))
    with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
        settle(version)
    with contextlib.suppress(PrecacheError):
        data.draw(st.sampled_from(USES))(victim)


RECEIPTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "as it was": lambda receipt: None,
    "of another shard": lambda receipt: receipt.update(shard=7),
    "of a negative shard": lambda receipt: receipt.update(shard=-1),
    "of no field": lambda receipt: receipt.update(objects={}),
    "of a checksum too large": lambda receipt: receipt["objects"]["image"].update(xxh3=2**128),
    "of no checks": lambda receipt: receipt["objects"]["image"].update(checks="no hex"),
    "with holes elsewhere": lambda receipt: receipt.update(holes={"99": ["failed", "why"]}),
    "with holes of no kind": lambda receipt: receipt.update(holes={"0": ["lost", "why"]}),
    "with too little content": lambda receipt: receipt.update(content=["a"]),
    "with parts of too few rows": lambda receipt: receipt.update(parts=["a"]),
    "with too many labels": lambda receipt: receipt.update(labels=[1] * 99),
    "with labels too large": lambda receipt: receipt.update(labels=[2**70] * 13),
    "with sums of other channels": lambda receipt: receipt["sums"]["image"].update(total=[1.0]),
    "with sums of another field": lambda receipt: receipt["sums"].update(
        x=receipt["sums"]["image"]
    ),
}


@pytest.mark.parametrize("case", RECEIPTS)
def test_a_shard_with_a_forged_receipt_is_made_again_and_no_other(
    case: str, built: Path, tmp_path: Path
) -> None:
    made = precache.open(built / "store")
    [leaf], sums = made.shard_leaves("image"), made.shard_sums("image")
    assert sums is not None
    [(count, *flat)], checks = sums.tolist(), made.checks("image", 0).tobytes().hex()
    receipt: dict[str, Any] = {
        "shard": 0,
        "objects": {
            "image": {"size": leaf.size, "xxh3": leaf.xxh3, "raw_nbytes": 1, "checks": checks}
        },
        "holes": {row: hole for row, (_, hole) in made.holes.items()},
        "content": [""] * 13,
        "sums": {"image": {"count": int(count), "total": flat[:3], "squares": flat[3:]}},
        "seconds": {},
        "cpu_seconds": 0.0,
    }
    RECEIPTS[case](receipt)
    version = tmp_path / "store" / made.id
    shutil.copytree(Path(made.path) / "image/c", version / "image/c")
    write(version / "_build/receipts/00000000.json", json.dumps(receipt).encode())
    result = build_here(built / "in", tmp_path / "store", RECIPE, OPTIONS)
    assert (result.version, result.shards_skipped) == (made.id, case == "as it was")
    assert precache.verify(tmp_path / "store").ok


# --- files that are none, or endless --------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["zarr.json", "image/zarr.json", "valid/c/0", "key/c/0", "rows/size/c/0", "shards/image/c/0/0"],
)
def test_a_small_object_of_a_terabyte_is_not_read(
    name: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are lowered, so that little is read where they do not hold."""
    version = version_of(store)
    monkeypatch.setattr(folder, "MOST_DOCUMENT", 1 << 20)
    monkeypatch.setattr(folder, "MOST_SMALL", 1 << 20)
    os.truncate(version / name, (1 << 20) + 1)
    what = rf"{name}.*it has 1,048,577 bytes, more than the 1,048,576 .*; remove it"
    try:
        found = " ".join(f"{d.shard}: {d.reason}" for d in precache.verify(store).damage)
    except PrecacheError as error:
        found = str(error)
    assert re.search(what, found)
    if name in ("zarr.json", "valid/c/0", "shards/image/c/0/0"):
        with pytest.raises(StorageError, match=r"more than the [0-9,]+ bytes that such an object"):
            precache.open(store).valid, precache.Loader(store, batch_size=2)
    os.truncate(store / "commits/000002.json", 900 << 30)
    with pytest.raises(StorageError, match=r"000002.json: it has 966,367,641,600 bytes, more than"):
        precache.open(store)


def put_folder(path: Path) -> None:
    (path / "in").mkdir(parents=True)


@pytest.mark.parametrize(
    ("name", "put", "words"),
    [
        ("image/c/0/0/0/0", put_folder, "folder is where a file .* remove"),
        ("zarr.json", put_folder, "folder is where a file .* remove"),
        ("zarr.json", os.mkfifo, "it is a FIFO.*; remove"),
    ],
)
def test_what_is_in_the_place_of_a_file_is_to_be_removed(
    name: str, put: Callable[[Path], None], words: str, store: Path
) -> None:
    path = version_of(store) / name
    path.unlink()
    put(path)
    with pytest.raises(PrecacheError, match=f"{name}: .*{words} it"):
        build_again(store)
