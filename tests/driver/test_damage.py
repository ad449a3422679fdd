"""Damage is found by the same build, and what an error advises ends in the right rows."""

import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numcodecs import zstd

import precache
from precache.errors import BuildError, DamageError, PrecacheError
from precache.runtime.operating_system import is_on_network
from precache.storage.open import open_folder
from precache.store.small_arrays import small_array
from precache_workers.shards import field_writer
from tests.support import building
from tests.support.building import (
    assert_same,
    contents,
    cut,
    encoded,
    flip,
    labels,
    pixels,
    remains,
    rewrite,
    write,
    write_jpegs,
)
from tests.support.changing_sources import make_unfetchable
from tests.support.servers import S3Server

OPS = [{"op": "decode"}, {"op": "resize", "size": [56, 56]}]
CODECS = ("image", "raw", "zstd")
RECIPE = precache.Recipe.from_dict(
    {"fields": {codec: {"ops": OPS, "codec": codec} for codec in CODECS}}
)


build = functools.partial(building.build, recipe=RECIPE, shard_samples=8)


ZSTD = precache.Recipe.image(resize=(56, 56), codec="zstd")


def encode_otherwise(chunk: np.ndarray) -> bytes:
    """Encode as another release of numcodecs may."""
    return bytes(zstd.compress(np.ascontiguousarray(chunk), 19, True))


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A source of 24 photographs, a store of them in three shards, and the version's id."""
    root = tmp_path_factory.mktemp("intact")
    source = write_jpegs(root / "in", 24, (32, 24))
    return source, root / "store", build(source, root / "store").version


@pytest.fixture
def damaged(intact: tuple[Path, Path, str], tmp_path: Path) -> Path:
    """A copy of the store, to be damaged."""
    shutil.copytree(intact[1], tmp_path / "store")
    return tmp_path / "store"


def flipped(name: str, share: float) -> Callable[[Path], None]:
    return lambda version: flip(version / name, share, 4)


def cut_short(name: str) -> Callable[[Path], None]:
    return lambda version: os.truncate(version / name, (version / name).stat().st_size // 2)


def swapped(one: str, other: str) -> Callable[[Path], None]:
    def act(version: Path) -> None:
        first, second = version / one, version / other
        first.rename(version / "between")
        second.rename(first)
        (version / "between").rename(second)

    return act


def flipped_after(text: str) -> Callable[[Path], None]:
    """Flip a bit of the first value after a name in a version's own document."""

    def act(version: Path) -> None:
        path = version / "zarr.json"
        data = path.read_bytes()
        found = re.search(rf'"{text}":[\s"\[{{]*'.encode(), data)
        assert found
        flip(path, found.end(), 4)

    return act


def both(*acts: Callable[[Path], None]) -> Callable[[Path], None]:
    def act(version: Path) -> None:
        for one in acts:
            one(version)

    return act


def edited(**values: Any) -> Callable[[Path], None]:
    def act(version: Path) -> None:
        document = json.loads((version / "zarr.json").read_bytes())
        document["attributes"]["precache"].update(values)
        (version / "zarr.json").write_text(json.dumps(document))

    return act


DAMAGE: dict[str, Callable[[Path], None]] = {
    **{f"row of {codec}": flipped(f"{codec}/c/1/0/0/0", 0.3) for codec in CODECS},
    "index": flipped("zstd/c/1/0/0/0", 0.998),
    "cut": cut_short("raw/c/2/0/0/0"),
    "exchanged": swapped("raw/c/0/0/0/0", "raw/c/1/0/0/0"),
    "row table": flipped("rows/size/c/0", 0.5),
    "labels": flipped("label/c/0", 0.5),
    "keys": flipped("key/c/0", 0.5),
    "checksums": flipped("shards/raw/c/0/0", 0.7),
    "sums": flipped("_sums/raw/c/0/0", 0.5),
    "checksums and a shard": both(flipped("shards/raw/c/0/0", 0.7), flipped("raw/c/1/0/0/0", 0.3)),
    "sums and a shard": both(flipped("_sums/raw/c/0/0", 0.5), flipped("image/c/1/0/0/0", 0.3)),
    "rows and holes": both(flipped("rows/size/c/0", 0.5), flipped("holes/c/0", 0.5)),
    "document of a field": flipped("raw/zarr.json", 0.4),
    "document cut": cut_short("zarr.json"),
    **{
        f"document at {text}": flipped_after(text)
        for text in ("zarr_format", "fingerprint", "rows/size/c/0")
    },
    "mean": edited(mean={codec: [1.0, 2.0, 3.0] for codec in CODECS}),
    "rows": edited(rows=23),
    "id": edited(version="0" * 32),
}


def reading(store: Path) -> str:
    """What a training says, empty if nothing."""
    try:
        for codec in CODECS:
            pixels(store, codec)
        labels(store)
    except PrecacheError as error:
        return str(error)
    return ""


def verifying(store: Path) -> str:
    """What `verify` says, empty if all is whole."""
    try:
        found = precache.verify(store)
    except PrecacheError as error:
        return str(error)
    return "" if found.ok else str(found)


def actions(advice: str, store: Path) -> dict[str, Any]:
    """What a text says to do before the same build: files to remove; and options of the build."""
    files = re.findall(r"remove (\S*zarr\.json)", advice)
    paths = [Path(name) for name in files]
    found = [p if p.is_absolute() else next(store.glob(f"*/{p}")) for p in paths]
    for option in ("recompute", "verify"):
        if f"--{option}" in advice:
            return {"remove": tuple(found), option: True}
    assert "command again" in advice, advice
    return {"remove": tuple(found)}


def follow(advice: str, source: Path | str, store: Path, recipe: precache.Recipe = RECIPE) -> str:
    """Do what a text says; returns what the build says, empty if it went well."""
    options = actions(advice, store)
    for path in options.pop("remove"):
        path.unlink()
    try:
        build(source, store, recipe=recipe, **options)
    except PrecacheError as error:
        return str(error)
    return ""


right_rows = functools.cache(pixels)
"""Rows of the store that stays intact."""


def assert_right(store: Path, intact: tuple[Path, Path, str]) -> None:
    """The same bytes; of another version, the same rows and labels."""
    _, good, version = intact
    assert precache.verify(store).ok
    assert remains(store) == []
    if precache.open(store).id == version:
        assert contents(store) == contents(good)
        return
    for codec in CODECS:
        assert_same(pixels(store, codec), right_rows(good, codec))
    assert labels(store) == labels(good)


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_advised_on_damage_ends_in_the_right_rows(
    damage: str, intact: tuple[Path, Path, str], damaged: Path
) -> None:
    """Whoever advises it: a reader, `verify`, or nobody, when the same build comes again."""
    source, _, version = intact
    DAMAGE[damage](damaged / version)
    found = verifying(damaged)
    assert found, "not found"
    # A reader reads no row table.
    advised = {"the same command again", reading(damaged) or found, found}
    ways = {tuple(sorted(actions(advice, damaged).items())): advice for advice in advised}
    for number, way in enumerate(ways.values()):
        store, steps = damaged.with_name(f"store{number}"), 0
        shutil.copytree(damaged, store)
        advice = way.replace(f"{damaged}/", f"{store}/")
        while advice:
            assert "delete" not in advice
            advice, steps = follow(advice, source, store), steps + 1
            assert steps <= 3, advice
        assert_right(store, intact)


class Arrays:
    """A dataset of arrays that all take as many bytes."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"image": np.full((64, 32), number, np.uint32), "label": number % 3}


PLAIN = precache.Recipe.from_dict({"fields": {"image": {"ops": [], "codec": "raw"}}})


def rotated(version: Path) -> None:
    """Three shards of as many bytes, each in the place of the next."""
    swapped("image/c/0/0/0", "image/c/1/0/0")(version)
    swapped("image/c/1/0/0", "image/c/2/0/0")(version)


def other_table(version: Path) -> None:
    """An intact table of digests, of other shards."""
    table = np.ones((3, 3), np.uint64)
    (version / "shards/image/c/0/0").write_bytes(small_array(table, ["a", "b"])["c/0/0"])


@pytest.mark.parametrize(
    ("damage", "names", "says"),
    [
        (rotated, [f"image/c/{number}/0/0" for number in range(3)], None),
        (rotated, [f"image/c/{number}/0/0" for number in range(3)], verifying),
        (other_table, ["shards/image/c/0/0"], verifying),
    ],
)
def test_shards_and_their_table_are_told_apart(
    damage: Callable[[Path], None],
    names: list[str],
    says: Callable[[Path], str] | None,
    tmp_path: Path,
) -> None:
    store, source = tmp_path / "store", f"python:{__name__}:Arrays"
    version = Path(build(source, store, recipe=PLAIN).path)
    before = contents(store)
    damage(version)
    assert [each.shard for each in precache.verify(store).damage] == names
    with pytest.raises(PrecacheError, match=names[0]):
        pixels(store)
    advice = says(store) if says is not None else "the same command again"
    assert "remove" not in advice
    assert follow(advice, source, store, PLAIN) == ""
    assert precache.verify(store).ok
    assert contents(store) == before


def test_a_shard_of_another_version_in_place_of_one_is_made_again(
    intact: tuple[Path, Path, str], damaged: Path
) -> None:
    source, good, version = intact
    other = precache.Recipe.from_dict(
        {"fields": {**RECIPE.to_dict()["fields"], "raw": {"ops": [*OPS, {"op": "horizontal_flip"}],
                                                          "codec": "raw", "variants": 1}}}
    )  # fmt: skip
    second = build(source, damaged, recipe=other).version
    before = contents(damaged)
    swapped(f"{version}/raw/c/0/0/0/0", f"{second}/raw/c/0/0/0/0")(damaged)
    for name, recipe in ((version, RECIPE), (second, other)):
        assert not precache.verify(damaged / name).ok
        assert follow(verifying(damaged / name), source, damaged, recipe) == ""
        assert precache.verify(damaged / name).ok
    precache.use(f"{damaged}@{version[:6]}")
    for codec in CODECS:
        assert_same(pixels(damaged, codec), right_rows(good, codec))
    kept = {name: data for name, data in before.items() if not name.startswith("commits/")}
    assert kept.items() <= contents(damaged).items()


def test_where_the_source_changed_the_way_out_is_a_new_version(
    intact: tuple[Path, Path, str], damaged: Path, tmp_path: Path
) -> None:
    """What the source gives today is as large and as old as what was built."""
    source = tmp_path / "in"
    shutil.copytree(intact[0], source)
    build(source, damaged)
    photo = source / "cat/0000.jpg"
    rewrite(photo, encoded(cut(77, (32, 24)), quality=40))
    shard = list(precache.open(damaged).keys).index("cat/0000.jpg") // 8
    before = contents(damaged)
    flip(damaged / intact[2] / f"raw/c/{shard}/0/0/0", 100)
    spoiled = contents(damaged)
    with pytest.raises(BuildError, match="came out different from what it was") as error:
        build(source, damaged, ignore_ctime=True)
    advice = str(error.value)
    assert "--recompute" in advice
    assert contents(damaged) == spoiled
    assert spoiled != before
    assert follow(advice, source, damaged) == ""
    assert precache.verify(damaged).ok
    build(source, tmp_path / "fresh")
    assert_same(pixels(damaged, "raw"), pixels(tmp_path / "fresh", "raw"))


def test_other_bytes_of_another_encoder_are_refused_with_the_way_out(
    intact: tuple[Path, Path, str], tmp_path: Path
) -> None:
    source, store = intact[0], tmp_path / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field_writer, "encoder", lambda *_: encode_otherwise)
        build(source, store, recipe=ZSTD)
    before = contents(store)
    next(store.glob("*/image/c/1/*/*/*")).unlink()
    left = contents(store)
    advice = follow("the same command again", source, store, ZSTD)
    assert "came out different from what it was" in advice
    assert contents(store) == left != before
    assert follow(advice, source, store, ZSTD) == ""
    assert precache.verify(store).ok


def test_shards_made_before_one_that_cannot_be_are_kept(
    intact: tuple[Path, Path, str], tmp_path: Path
) -> None:
    source, store = intact[0], tmp_path / "store"
    build(source, store, recipe=ZSTD)
    version = precache.open(store)
    for shard in (0, 1):
        next(store.glob(f"*/image/c/{shard}/*/*/*")).unlink()
    with pytest.MonkeyPatch.context() as patch:
        make_unfetchable(patch, version.keys[9])
        assert "are not done" in follow("the same command again", source, store, ZSTD)
    assert {each.shard for each in precache.verify(store).damage} == {"image/c/1/0/0/0"}
    assert follow("the same command again", source, store, ZSTD) == ""
    assert precache.verify(store).ok


def test_the_root_of_a_recomputed_version_is_mended_from_its_copy(
    intact: tuple[Path, Path, str], damaged: Path
) -> None:
    source, _, first = intact
    again = build(source, damaged, recompute=True).version
    assert again == first.replace(".1", ".2")
    good = contents(damaged)
    flip(damaged / again / "zarr.json", 0.5, 4)
    assert "command again" in reading(damaged)
    assert build(source, damaged).version == again
    assert contents(damaged) == good


def test_damage_of_a_version_whose_document_was_touched_is_damage(
    intact: tuple[Path, Path, str], damaged: Path
) -> None:
    flip(damaged / intact[2] / "raw/c/1/0/0/0", 100)
    with precache.Loader(damaged, batch_size=24, fields=["raw"], device="cpu") as loader:
        (damaged / intact[2] / "zarr.json").touch()
        with pytest.raises(DamageError, match=r"shard .*raw/c/1/0/0/0 is damaged at row .* \(key"):
            list(loader)


# --- what is read when ---------------------------------------------------------------------------


def test_a_build_says_what_it_checked(
    intact: tuple[Path, Path, str], damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _, version = intact
    unread = "the bytes of its shards were not checked (--verify reads them)"

    def said(**options: Any) -> str:
        build(source, damaged, progress=True, **options)
        return " ".join(capsys.readouterr().err.split())

    whole = f"Nothing to do: version {version[:8]} is complete; "
    assert re.search(rf"{whole}[0-9.]+ [KM]B checked", said())
    assert whole + unread in said(verify=False)
    flip(damaged / version / "image/c/1/0/0/0", 50)
    assert whole + unread in said(verify=False)
    told = said()
    assert f"Version {version[:8]} is damaged in 1 of 9 shards: image/c/1/0/0/0" in told
    assert f"Version {version[:8]} is complete again: 1 shard built" in told
    assert precache.verify(damaged).ok


def test_on_a_network_all_bytes_are_read_on_request_alone(
    intact: tuple[Path, Path, str], damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _, version = intact
    path = damaged / version / "raw/c/1/0/0/0"
    flip(path, 100)
    monkeypatch.setattr("precache_workers.driver.build.is_on_network", lambda path: True)
    build(source, damaged)
    assert not precache.verify(damaged).ok
    build(source, damaged, verify=True)
    assert precache.verify(damaged).ok


def test_file_systems_are_told_apart_by_their_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_on_network(tmp_path)
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    kinds = frozenset(line.rpartition(" - ")[2].split()[0] for line in mounts)
    monkeypatch.setattr("precache.runtime.operating_system.NETWORK_DISKS", kinds)
    assert is_on_network(tmp_path)
    assert not is_on_network(tmp_path / "missing")


def test_in_a_bucket_bytes_are_read_on_request_alone(
    s3: S3Server, intact: tuple[Path, Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = s3.options()
    store: Any = "s3://bucket/checked"
    folder = open_folder(build(intact[0], store, storage_options=options).path, options)
    data = folder.read("raw/c/1/0/0/0")
    folder.put("raw/c/1/0/0/0", [data[:100] + bytes([data[100] ^ 1]) + data[101:]])
    build(intact[0], store, storage_options=options, progress=True)
    assert "were not checked (--verify reads them)" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(DamageError, match="command again with --verify, which repairs it"):
        pixels(store, "raw", storage_options=options)
    build(intact[0], store, storage_options=options, verify=True)
    assert folder.read("raw/c/1/0/0/0") == data
    folder.put("raw/c/1/0/0/0", [data[:100]])  # ends before its index begins
    with pytest.raises(DamageError, match=r"it has 100 bytes where .* again with --verify"):
        pixels(store, "raw", storage_options=options)


def test_ensure_reads_no_shard_of_a_complete_version(
    intact: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, store, version = intact

    def fail(*arguments: Any) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("precache_workers.driver.build.compare_objects", fail)
    options: Any = {"address": "serial", "shard_samples": 8, "progress": False}
    assert precache.ensure(source, store, RECIPE, **options).id == version  # type: ignore[union-attr]


# --- damage that would be linked ------------------------------------------------------------------


@pytest.fixture
def grown(intact: tuple[Path, Path, str], tmp_path: Path) -> Path:
    """The source with one photograph more."""
    shutil.copytree(intact[0], tmp_path / "in")
    write(tmp_path / "in/cat/new.jpg", encoded(cut(99, (32, 24))))
    return tmp_path / "in"


def test_a_damaged_shard_is_not_linked_and_what_stays_damaged_is_said(
    intact: tuple[Path, Path, str], damaged: Path, grown: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First all its samples are as they were; then another row of it has a new sample."""
    source, good, version = intact
    keys = list(precache.open(damaged).keys)
    shutil.copytree(damaged, damaged.parent / "first")
    for store in (damaged.parent / "first", damaged):
        flip(store / version / "raw/c/1/0/0/0", 8 * 3 * 56 * 56 - 50)
        if store == damaged:
            write(grown / keys[8], encoded(cut(55, (32, 24))))
        result = build(grown, store, progress=True)
        said = " ".join(capsys.readouterr().err.split())
        assert f"Version {version[:8]} is damaged in raw/c/1/0/0/0: nothing of this was" in said
        assert (result.shards, result.shards_reused) == (4, 2)
        assert precache.verify(store).ok
        own = Path(result.path, "raw/c/1/0/0/0").read_bytes()
        whole = (good / version / "raw/c/1/0/0/0").read_bytes()
        assert (own == whole) == (store != damaged)
        assert remains(store) == []
    build(grown, damaged.parent / "fresh")
    for codec in CODECS:
        assert_same(pixels(damaged, codec), pixels(damaged.parent / "fresh", codec))
    assert not precache.verify(damaged / version).ok
    [way] = re.findall(r"to keep it, see precache verify (\S+)", said)
    assert "the precache build command that made it, with --verify" in str(precache.verify(way))
    precache.use(way)
    build(source, damaged, verify=True)
    assert precache.verify(damaged / version).ok
    assert precache.open(damaged).id == version


def test_without_a_check_shards_are_linked_and_that_is_said(
    intact: tuple[Path, Path, str], damaged: Path, grown: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(damaged / intact[2] / "raw/c/1/0/0/0", 100)
    result = build(grown, damaged, progress=True, verify=False)
    said = " ".join(capsys.readouterr().err.split())
    assert f"from version {intact[2][:8]}, whose bytes were not checked (--verify reads" in said
    assert result.shards_reused == 3
    build(grown, damaged)
    assert precache.verify(damaged).ok


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_bytes_that_were_wrong_from_the_start_are_made_anew_by_the_command_named(
    codec: Any, intact: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No digest tells them, so that neither `verify` nor a build with --verify finds any."""
    recipe, store = precache.Recipe.image(resize=(56, 56), codec=codec), tmp_path / "store"
    encoder = field_writer.encoder

    def wrongly(*arguments: Any) -> Any:
        encode = encoder(*arguments)
        return lambda chunk: bytes([*(data := encode(chunk))[:-9], data[-9] ^ 1, *data[-8:]])

    monkeypatch.setattr(field_writer, "encoder", wrongly)
    build(intact[0], store, recipe=recipe)
    monkeypatch.undo()
    assert precache.verify(store).ok
    with (
        precache.Loader(store, 4, device="cpu") as loader,
        pytest.raises(DamageError, match="--recompute makes a new version"),
    ):
        list(loader)
    build(intact[0], store, recipe=recipe, recompute=True)
    with precache.Loader(store, 4, device="cpu") as loader:
        assert len(list(loader)) == 6
