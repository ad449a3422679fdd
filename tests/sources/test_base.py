"""Listing and fetching of samples, labels and classes, and code of the user's own."""

import contextlib
import importlib
import os
import pickle
import re
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import precache
from precache.errors import FetchError, RecipeError, SourceError, StorageError, UsageError
from precache.storage.base import LINK_OUT, NO_FILE
from precache_workers.sources.base import Sample, Source
from precache_workers.sources.kinds import open_source
from precache_workers.user_code.identity import code_digest
from precache_workers.user_code.loading import load_object
from tests.support.building import (
    ask,
    build_as_anyone,
    build_here,
    cut,
    encoded,
    labels,
    pixels,
    write,
    write_jpegs,
)
from tests.support.containers import class_of, listed

SMALL = precache.Recipe.image(resize=16, crop=16)


# --- folders ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        ("cat/2.jpg cat/deep/er/3.png dog/1.jpg eel/4.webp", ["cat", "cat", "dog", "eel"]),
        ("a.JPEG b.jpg c.png", [None] * 3),
        ("cat/1.jpg stray.jpg", ["cat", None]),
        (
            "a.b.jpg a.bmp a.gif a.jfif a.jpe a.jpeg a.jpg a.png a.tif a.webp b.JPG b.TIFF",
            [None] * 12,
        ),
    ],
)
def test_the_class_is_the_first_folder_of_a_path(
    tmp_path: Path, names: str, classes: list[str | None]
) -> None:
    for name in reversed(names.split()):
        write(tmp_path / name, b"12345")
    listing = listed(tmp_path)
    assert [*class_of(listing).items()] == [*zip(names.split(), classes, strict=True)]
    assert listing.table.classes == tuple(dict.fromkeys(filter(None, classes)))
    times = [(tmp_path / name).stat().st_mtime_ns for name in names.split()]
    assert (listing.table.sizes == 5).all()
    assert listing.table.mtimes.tolist() == times


def test_files_that_are_no_images_are_ignored_and_counted(tmp_path: Path) -> None:
    others = ("README", "cat/list.txt", "cat/1.jpg.bak", "dog/Thumbs.db", "jpg", "dog/._1.jpg")
    for name in ("cat/1.jpg", *others):
        write(tmp_path / name, b"x")
    listing = listed(tmp_path)
    assert listing.table.keys == ["cat/1.jpg"]
    assert sum(listing.ignored.values()) == len(others)
    assert listing.table.classes == ("cat",), "a folder without an image is no class"


@pytest.mark.parametrize("spelled", ["file://{}", "{}/"])
def test_a_folder_is_the_same_however_it_is_spelled(tmp_path: Path, spelled: str) -> None:
    """The digest of a listing decides a version."""
    write(tmp_path / "a.jpg", b"x")
    assert listed(spelled.format(tmp_path)).table.digest == listed(tmp_path).table.digest


def test_keys_of_any_characters_survive_a_build(tmp_path: Path) -> None:
    names = ["Zoë/größe 1.jpg", "Zoë/日本 'x' \"y\".jpg", "a,b/%41#?.jpg", "a,b/new\nline.jpg"]
    for number, name in enumerate(names):
        write(tmp_path / "in" / name, encoded(cut(number), quality=90))
    build_here(tmp_path / "in", tmp_path / "store", SMALL)
    assert labels(tmp_path / "store") == {
        names[0]: 0,
        names[1]: 0,
        names[2]: 1,
        names[3]: 1,
    }


# --- links --------------------------------------------------------------------------------------


@pytest.fixture
def farm(tmp_path: Path) -> Path:
    """A source of links, all of which lead out of it."""
    for name in ("1.jpg", "2.jpg", "notes.txt"):
        write(tmp_path / "elsewhere" / name, b"x")
    source = tmp_path / "in"
    source.mkdir()
    (source / "cat").symlink_to(tmp_path / "elsewhere")
    (source / "one.jpg").symlink_to(tmp_path / "elsewhere/1.jpg")
    (source / "notes.txt").symlink_to(tmp_path / "elsewhere/notes.txt")
    return source


def test_links_within_a_source_are_followed_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "all/1.jpg", b"1")
    (tmp_path / "cat").symlink_to("all")
    (tmp_path / "one.jpg").symlink_to(tmp_path / "all/1.jpg")
    listing = listed(tmp_path)
    assert listing.table.keys == ["all/1.jpg", "cat/1.jpg", "one.jpg"]
    counted = "2 of 3 images are links to others, such as cat/1.jpg to all/1.jpg, and are samples"
    assert any(note.startswith(counted) for note in listing.notes)
    assert fetch(open_source(str(tmp_path)), "cat/1.jpg").inputs == {"bytes": b"1"}


def test_links_that_lead_out_of_a_source_are_counted_or_followed(farm: Path) -> None:
    with pytest.raises(SourceError, match=r"no image .*left out: 2 links .*--follow-links"):
        listed(farm)
    source = open_source(str(farm), follow_links=True)
    listing = source.list(lambda found: None)
    assert (listing.table.keys, listing.left_out) == (["cat/1.jpg", "cat/2.jpg", "one.jpg"], {})
    assert fetch(pickle.loads(pickle.dumps(source)), "cat/2.jpg").inputs == {"bytes": b"x"}

    write(farm / "a.jpg", b"x")
    (farm / "lost.jpg").symlink_to(farm.parent / "nowhere.jpg")
    listing = listed(farm)
    assert listing.table.keys == ["a.jpg"]
    assert (listing.left_out, listing.ignored) == ({LINK_OUT: 3}, {".txt": 1})
    for key in ("one.jpg", "cat/1.jpg", "lost.jpg"):
        with pytest.raises(FetchError, match=r"it leads out of .*/in|No such file"):
            fetch(open_source(str(farm)), key)


@pytest.mark.parametrize("follow", [False, True])
def test_what_is_no_file_is_counted_and_waited_for_by_nobody(tmp_path: Path, follow: bool) -> None:
    source = tmp_path / "in"
    write(source / "a.jpg", b"x")
    os.mkfifo(source / "fifo.jpg")
    os.mkfifo(source / "fifo")
    (source / "to a fifo.jpg").symlink_to("fifo.jpg")
    (source / "null.jpg").symlink_to("/dev/null")
    (source / "kernel.jpg").symlink_to("/proc/kmsg")
    (source / "proc").symlink_to("/proc")
    bound = source / "socket.jpg"
    with socket.socket(socket.AF_UNIX) as bind, contextlib.chdir(source):
        bind.bind(bound.name)
    found = open_source(str(source), follow_links=follow)
    listing = found.list(lambda found: None)
    assert listing.table.keys == ["a.jpg"]
    links = 0 if follow else 3
    assert listing.left_out == {NO_FILE: 6 - links} | ({LINK_OUT: links} if links else {})
    assert listing.ignored == {"": 1}
    for key in ("fifo.jpg", "to a fifo.jpg", "socket.jpg", "null.jpg", "kernel.jpg"):
        with pytest.raises(FetchError, match=rf"{key}: "):
            fetch(found, key)


@pytest.mark.parametrize("key", ["../secret.jpg", "/etc/passwd", "a//b.jpg", "./a.jpg", "a\0b.jpg"])
def test_a_key_that_is_no_name_in_the_source_is_not_fetched(tmp_path: Path, key: str) -> None:
    write(tmp_path / "secret.jpg", b"x")
    write(tmp_path / "in/a.jpg", b"x")
    with pytest.raises(FetchError, match=f"{re.escape(repr(key))} is no name below .*/in: it must"):
        fetch(open_source(str(tmp_path / "in")), key)


@pytest.mark.parametrize("target", [".", "..", "cat", "cat/deep", "../.."])
def test_a_link_back_up_lists_nothing_twice(tmp_path: Path, target: str) -> None:
    source = tmp_path / "in"
    for key in ("top.jpg", "cat/1.jpg", "cat/deep/2.jpg"):
        write(source / key, b"x")
    (source / "cat/deep/loop").symlink_to(source / "cat/deep" / target)
    (source / "self").symlink_to(source)
    keys = listed(source).table.keys
    assert keys == ["cat/1.jpg", "cat/deep/2.jpg", "top.jpg"]


@pytest.mark.parametrize("target", ["nowhere.jpg", "link.jpg"])
def test_a_link_to_nothing_or_to_itself_is_a_sample_that_cannot_be_fetched(
    tmp_path: Path, target: str
) -> None:
    """Not one that is silently left out: what it led to may be a disk that is not mounted."""
    write(tmp_path / "a.jpg", b"x")
    (tmp_path / "link.jpg").symlink_to(tmp_path / target)
    table = listed(tmp_path).table
    assert dict(zip(table.keys, table.sizes.tolist(), strict=True)) == {"a.jpg": 1, "link.jpg": -1}
    with pytest.raises(FetchError, match=r"link\.jpg"):
        fetch(open_source(str(tmp_path)), "link.jpg")


def test_two_links_to_one_folder_are_two_classes(tmp_path: Path) -> None:
    """As torchvision has it; what a listing says must not depend on a directory's order."""
    write(tmp_path / "in/b/1.jpg", b"x")
    for name in ("a", "c", "d"):
        (tmp_path / "in" / name).symlink_to(tmp_path / "in/b")
    table = listed(tmp_path / "in").table
    assert table.keys == ["a/1.jpg", "b/1.jpg", "c/1.jpg", "d/1.jpg"]
    assert table.classes == ("a", "b", "c", "d")


# --- sources that are none ----------------------------------------------------------------------


ARRAYS = "torch map-style Dataset.* python:mydata:photos"


@pytest.mark.parametrize(
    ("files", "source", "why"),
    [
        ("", "nowhere", r"nowhere does not exist; give a folder of images"),
        ("", "*/*.png", r"does not exist; give a folder of images; .* such as \*.tar"),
        ("a.jpg", "a.jpg", r"a\.jpg is not a folder; .* or --source-kind"),
        ("1.bin", "1.bin", f"1.bin is not a folder; .* or --source-kind .*{ARRAYS}"),
        ("photos.h5", "photos.h5", f"photos.h5 is an HDF5 file: .*{ARRAYS}"),
        ("photos.h5", "", rf"no image .other files: 1 .h5.; photos.h5 is an HDF5 file: .*{ARRAYS}"),
        ("PHOTOS.BETON", "PHOTOS.BETON", f"PHOTOS.BETON is an FFCV dataset: .*{ARRAYS}"),
        ("a.tar", "", r"a\.tar is a tar archive: give '.*/\*\*/\*\.tar' to read"),
        ("notes.txt", "", r"no image \(other files: 1 .txt\); images end in .*\.jpg"),
        ("", "nowhere://bucket/in", r"nowhere:// is not supported; give a local path, gs://"),
    ],
)
def test_what_is_no_source_is_named_with_the_way(
    tmp_path: Path, files: str, source: str, why: str
) -> None:
    for name in files.split():
        write(tmp_path / name, b"x")
    with pytest.raises((SourceError, UsageError), match=why):
        listed(source if ":" in source else tmp_path / source)


# --- fetching -----------------------------------------------------------------------------------


def fetch(source: Source, key: str, size: int = -1) -> Sample:
    """One sample; raises where it cannot be had."""
    [found] = source.fetch([key], [size])
    if isinstance(found, FetchError):
        raise found
    return found


def test_fetch_gives_bytes_and_their_hash_or_what_became_of_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a.jpg", b"12345")
    write(tmp_path / "same.jpg", b"12345")
    write(tmp_path / "other.jpg", b"54321")
    source = open_source(str(tmp_path))
    a, same, other = (fetch(source, f"{name}.jpg", 5) for name in ("a", "same", "other"))
    assert next(iter(a.inputs.values())) == b"12345"
    assert a.content == same.content != other.content
    assert len(a.content) == 32
    write(tmp_path / "a.jpg", b"123456")
    with pytest.raises(FetchError, match=r"a\.jpg has more than 5 bytes and had 5 .* build again"):
        fetch(source, "a.jpg", 5)
    with pytest.raises(FetchError, match=r"cannot read .*gone\.jpg: No such file"):
        fetch(source, "gone.jpg", 5)


# --- torch datasets -----------------------------------------------------------------------------

DATASET = """
    import numpy as np
    import torch

    class Bare(torch.utils.data.Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, i):
            return {"image": torch.full((3, 8, 8), i, dtype=torch.uint8), "target": i + 3,
                    "vector": (np.arange(4) * i).astype(">f4")}
"""


def test_fields_start_from_items_of_dicts(module: Callable[[str], str], tmp_path: Path) -> None:
    fields = {
        "image": {"ops": [{"op": "decode"}]},
        "vector": {"input": "vector"},
        "again": {"input": "image", "ops": [{"op": "decode", "mode": "L"}]},
    }
    recipe, source = precache.Recipe.from_dict({"fields": fields}), f"python:{module(DATASET)}:Bare"
    build_here(source, tmp_path / "store", recipe)
    assert (pixels(tmp_path / "store")["4"] == 4).all()
    assert pixels(tmp_path / "store", "again")["4"].shape == (1, 8, 8)
    vectors = pixels(tmp_path / "store", "vector")
    assert vectors["2"].dtype == np.float32
    assert vectors["2"].tolist() == [0, 2, 4, 6]
    hashes = [fetch(open_source(source), str(i)).content for i in (0, 1, 1, 2)]
    assert hashes[1] == hashes[2]
    assert len(set(hashes)) == 3
    lacking = precache.Recipe.from_dict({"fields": {"mask": {"input": "masks"}}})
    with pytest.raises(SourceError, match="field 'mask' starts from 'masks'; samples have 'image'"):
        build_here(source, tmp_path / "lacking", lacking)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("np.zeros(3, np.complex64)", "complex64"),
        ("np.array(['2020-01-01'], 'M8[D]')", "datetime64"),
        ("np.array([None])", "object"),
        ("'a caption'", "str"),
        ("np.zeros(2, [('a', 'u1'), ('b', 'f4')])", "void"),
    ],
)
def test_values_that_no_store_holds_are_named(
    module: Callable[[str], str], tmp_path: Path, value: str, name: str
) -> None:
    code = f"import numpy as np\ndef make():\n    return [{{'x': {value}}}] * 3\n"
    recipe = precache.Recipe.from_dict({"fields": {"x": {"codec": "raw"}}})
    with pytest.raises(UsageError, match=name):
        build_here(f"python:{module(code)}:make", tmp_path / "store", recipe)
    assert not (tmp_path / "store/commits").exists()


GETATTR = "def __getattr__(name): raise AttributeError"
LAZY = "class Lazy:\n    __slots__ = ()\nimport sys; sys.modules[__name__] = Lazy()"
SPEECHLESS = "class A(list):\n    def __repr__(self): return self.root\nphotos = A()"


@pytest.mark.parametrize(
    ("code", "name", "why"),
    [
        ("", "no_such_module:D", "there is no module 'no_such_module' here"),
        ("", "json.no_such_module:D", "there is no module 'json.no_such_module' here"),
        ("", "json:NoSuchThing", "there is none in .*json"),
        ("", "json:dump_", r"did you mean dumps?\?"),
        ("", "json:__name__", "it is of type str, which cannot be called"),
        ("", "json", "such as data:Photos"),
        ("", ":D", "such as data:Photos"),
        ("", "json:", "such as data:Photos"),
        ("", "..:x", "as .. was imported"),
        (f"{GETATTR}(f'{{name}} is now Photos')", "NAME:Pictures",
         r"there is none in /.*py \(Pictures is now Photos"),
        (GETATTR, "NAME:Photos", "there is none in /.*py"),
        (f"{GETATTR}('no' * 999)", "NAME:Photos", r".* \((no){49}n…\)$"),
        (SPEECHLESS, "NAME:photos", "it is of type A, which cannot be called"),
        (LAZY, "NAME:Photos", "there is none in NAME .*'Lazy' object has no attribute 'Photos'"),
        ("import no_such_module", "NAME:f", ".*no_such_module.* as NAME was imported"),
        ("1 / 0", "NAME:f", ""), ("def f(:", "NAME:f", ""), ("raise SystemError", "NAME:f", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_named(
    module: Callable[[str], str], code: str, name: str, why: str
) -> None:
    made = module(code)
    name, why = (text.replace("NAME", made) for text in (name, why))
    said = f"cannot load '{name}': .*{why}" if why else made
    with pytest.raises(RecipeError, match=said):
        load_object(name)
    if not code:
        with pytest.raises(RecipeError, match=said):
            listed(f"python:{name}")


def test_a_sample_that_fails_is_not_a_hole_but_a_fetch_that_failed(
    module: Callable[[str], str],
) -> None:
    name = module(
        "class D:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): raise OSError('link is down')"
    )
    with pytest.raises(FetchError, match=f"sample 3 of {name}:D: .*link is down"):
        fetch(open_source(f"python:{name}:D"), "3")


def test_a_dataset_is_asked_by_one_thread_at_a_time(
    module: Callable[[str], str], tmp_path: Path
) -> None:
    """As by a DataLoader: datasets seek in files that they hold open."""
    code = """
        import threading
        import numpy as np

        class D:
            def __init__(self):
                self.free = threading.Lock()

            def __len__(self):
                return 96

            def __getitem__(self, i):
                assert self.free.acquire(blocking=False), "two at once"
                try:
                    pixels = np.random.default_rng(i).integers(0, 9, (64, 64, 3), np.uint8)
                    return np.sort(pixels.reshape(-1)).reshape(64, 64, 3), 0
                finally:
                    self.free.release()
    """
    result = build_here(
        f"python:{module(code)}:D",
        tmp_path / "store",
        precache.Recipe.image(),
        {"shard_samples": 96, "accept_missing": True, "max_failures": 96},
    )
    assert result.failed == 0, result.holes[:2]


def test_a_factory_is_called_once_in_a_process(module: Callable[[str], str]) -> None:
    code = """
        import threading
        calls = []
        gate = threading.Barrier(2, timeout=10)
        def make():
            calls.append(1)
            try:
                gate.wait(0.2)  # for another caller, who must not come
            except threading.BrokenBarrierError:
                pass
            return [(b"", 0)] * 4
    """
    name = module(code)
    source = open_source(f"python:{name}:make")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: fetch(source, key), ["0", "1"]))
    assert sum(sys.modules[name].calls) == 1


# --- digests of code ----------------------------------------------------------------------------

CODE = "def f(array): return array"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("itertools:count", "has no source here.*, else declare a version"),
        ("os.path:basename", "has no source here.*, else declare a version"),
        ("nowhere_at_all:f", "there is no module 'nowhere_at_all' here"),
        ("a.b.c:f", "there is no module 'a.b.c' here"),
        ("", "user_code_"),
    ],
)
def test_what_is_not_found_or_does_not_parse_is_not_hashed(
    module: Callable[[str], str], name: str, why: str
) -> None:
    with pytest.raises(RecipeError, match=why):
        code_digest(name or f"{module('def f(:')}:f")


def test_code_of_the_script_that_runs_is_not_told_to_declare_a_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as of `python script.py`
    with pytest.raises(RecipeError, match="workers run another script; put it into a module"):
        code_digest("__main__:f")


def test_what_is_in_memory_alone_is_to_be_named_where_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = write(tmp_path / "a_package_that_shrinks/ops.py", CODE.encode())
    importlib.import_module("a_package_that_shrinks.ops")
    file.unlink()
    monkeypatch.setitem(sys.modules, "a_package_that_shrinks.lazy", lambda: None)
    for name in ("ops", "lazy"):
        with pytest.raises(RecipeError, match="moved or renamed, name its new place, else declare"):
            code_digest(f"a_package_that_shrinks.{name}:f")


def test_a_source_that_cannot_be_searched_is_told_apart_from_a_missing_one(
    tmp_path: Path,
) -> None:
    locked = tmp_path / "locked"
    write_jpegs(locked / "in", 2)
    locked.chmod(0)
    try:
        found = ask(build_as_anyone, locked / "in", tmp_path / "store", SMALL, {})
    finally:
        locked.chmod(0o700)
    assert isinstance(found, StorageError | SourceError)
    assert "locked" in str(found)
    assert "Permission denied" in str(found)
