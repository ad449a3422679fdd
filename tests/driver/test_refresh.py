"""Fresh variants: child versions that drop the oldest one and link all others."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import precache
from precache.cli.main import main
from precache.errors import BuildError, StoreError, UsageError
from precache.storage.local import LocalFolder
from precache.store.commit_log import read_log, recordable_source
from precache_workers.driver.commit import commit
from tests.support.building import (
    ask,
    build_here,
    contents,
    cut,
    encoded,
    end,
    refresh_changes,
    refresh_until,
    remains,
    start,
    write,
    write_jpegs,
)
from tests.support.kinds import put_rows

SERIAL: dict[str, Any] = {"address": "serial"}


def recipe_of(variants: int = 3) -> precache.Recipe:
    return precache.Recipe.image(resize=40, random_resized_crop=24, flip=True, variants=variants)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Eleven photographs and a broken one."""
    write(tmp_path / "in/dog/broken.jpg", b"no photo")
    return write_jpegs(tmp_path / "in", 11)


@pytest.fixture
def store(source: Path, tmp_path: Path) -> Path:
    build_here(source, tmp_path / "store", recipe_of())
    return tmp_path / "store"


def inodes(store: Path, field: str = "image") -> dict[str, set[int]]:
    """Array -> inodes of its objects, of the current version."""
    version = precache.open(store)
    return {
        array: {
            path.stat().st_ino
            for path in Path(version.path, array, "c").rglob("0")
            if path.is_file()
        }
        for array in version.variants(field)
    }


def from_scratch(source: Path, tmp_path: Path, refreshed: int) -> Path:
    """A version of the recipe after so many refreshes, for which nothing was taken over."""
    recipe = recipe_of()
    for _ in range(refreshed):
        recipe = recipe.with_fresh_variants()
    return Path(build_here(source, tmp_path / f"scratch{refreshed}", recipe).path)


def test_a_fresh_variant_begins_at_a_cached_base(source: Path, tmp_path: Path) -> None:
    store = tmp_path / "based"
    build_here(source, store, precache.Recipe.image(resize=(40, 48)))
    ops = {"resize": (40, 48), "random_resized_crop": 24, "variants": 2}
    build_here(source, store, precache.Recipe.image(**ops))
    shutil.copytree(store, tmp_path / "other")
    result = precache.refresh(store, **SERIAL)
    assert result.rows_reused == 11  # the broken one is tried again
    scratch = precache.Recipe.image(**ops).with_fresh_variants()
    fresh = build_here(source, tmp_path / "other", scratch, {"recompute": True})
    assert contents(Path(result.path)) == contents(Path(fresh.path))
    precache.gc(store, keep=1, older_than=0)
    later = precache.refresh(store, **SERIAL)
    assert (later.rows_reused, precache.verify(store).ok) == (0, True)


def test_a_child_links_all_but_the_fresh_variant(source: Path, store: Path, tmp_path: Path) -> None:
    before = inodes(store)
    first = precache.refresh(store, **SERIAL)
    after = inodes(store)
    assert list(after) == ["image.1", "image.2", "image.3"]
    assert after["image.1"] == before["image.1"]
    assert after["image.2"] == before["image.2"]
    assert not after["image.3"] & set().union(*before.values())
    assert (first.failed, precache.verify(store).ok, remains(store)) == (1, True, [])
    assert [each.current for each in precache.versions(store).versions] == [True, False]
    results = [first, *(precache.refresh(store, **SERIAL) for _ in range(2))]
    assert len({each.version for each in results}) == 3
    assert precache.open(store).fields["image"].first_variant == 3
    precache.gc(store, keep=1, older_than=0)
    assert precache.verify(store).ok
    last = precache.refresh(store, **SERIAL)
    assert contents(Path(last.path)) == contents(from_scratch(source, tmp_path, 4))


def test_killed_at_any_change_the_same_command_finishes_it(
    source: Path, store: Path, tmp_path: Path
) -> None:
    wanted = contents(from_scratch(source, tmp_path, 1))
    whole = shutil.copytree(store, tmp_path / "whole")
    last = ask(refresh_changes, whole)
    for change in (3, 60, last - 4):
        part = tmp_path / f"killed{change}"
        shutil.copytree(store, part)
        old = contents(Path(precache.open(part).path))
        assert end(start(refresh_until, change, part)) == -9
        now = precache.open(part)
        if now.fields["image"].first_variant == 0:
            assert contents(Path(now.path)) == old
        precache.refresh(part, **SERIAL)
        assert contents(Path(precache.open(part).path)) == wanted
        assert precache.verify(part).ok
        assert remains(part) == []


def test_what_a_build_commits_meanwhile_stays_current(
    source: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A photo that came while a refresh ran is in the child that the next one makes current."""
    committed: list[str] = []

    def commit_later(*args: Any) -> None:
        if not committed:
            write(source / "fox/0099.jpg", encoded(cut(99)))
            committed.append("")
            committed[0] = build_here(source, store, recipe_of()).version
        commit(*args)

    monkeypatch.setattr("precache_workers.driver.build.commit", commit_later)
    with pytest.raises(BuildError, match="of which a child was built; refresh it again"):
        precache.refresh(store, **SERIAL)
    assert precache.open(store).id == committed[0]
    result = precache.refresh(store, **SERIAL)
    version = precache.open(store)
    assert version.id == result.version
    assert "fox/0099.jpg" in list(version.keys)
    assert list(version.variants("image")) == ["image.1", "image.2", "image.3"]
    assert read_log(LocalFolder(store)).commits[-1].parent == committed[0]
    assert precache.verify(store).ok


def test_a_loader_that_follows_sees_the_fresh_variant(store: Path) -> None:
    with precache.Loader(store, batch_size=4, refresh="epoch") as loader:
        seen = []
        for epoch in range(4):
            group = zarr.open_group(precache.open(store).path, mode="r")
            stored = group[f"image.{epoch}"][:]  # one refresh an epoch: each reads a new one
            rows = 0
            batches = iter(loader)
            for number, batch in enumerate(batches):
                if number == 1:
                    precache.refresh(store, **SERIAL)
                assert np.array_equal(batch["image"].numpy(), stored[batch["row"].numpy()])
                rows += len(batch["row"])
            assert rows == 11
            seen.append(stored.tobytes())
        assert len(set(seen)) == 4


def test_rows_stay_those_of_the_version(
    source: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples that are missing become holes if that is accepted."""
    write(source / "cat/late.jpg", encoded(cut(99)))
    result = precache.refresh(store, **SERIAL)
    assert result.samples == 12
    (source / "cat/0003.jpg").unlink()
    with pytest.raises(BuildError, match="run the same command again"):
        precache.refresh(store, **SERIAL)
    assert precache.open(store).id == result.version
    line = ["refresh", str(store), "--address", "serial", "--no-progress"]
    assert main(line) == 1
    assert "or with --accept-missing" in capsys.readouterr().err
    assert main([*line, "--accept-missing"]) == 0
    out = capsys.readouterr().out
    assert "hole: cat/0003.jpg: " in out
    assert "No such file" in out


def test_the_same_build_keeps_the_variants_that_there_are(source: Path, store: Path) -> None:
    precache.refresh(store, **SERIAL)
    refreshed = precache.refresh(store, **SERIAL)
    again = build_here(source, store, recipe_of())
    assert (again.version, again.shards_skipped) == (refreshed.version, again.shards)
    before = precache.CachedDataset(store, variant=4)
    write(source / "cat/late.jpg", encoded(cut(99)))
    grown = build_here(source, store, recipe_of())
    assert precache.open(store).fields["image"].first_variant == 2
    assert grown.rows_reused == 12
    after = precache.CachedDataset(store, variant=4)
    assert len(after) == len(before) + 1
    assert all(torch.equal(after[n]["image"], before[n]["image"]) for n in range(len(before)))
    for variants in (4, 2):
        other = build_here(source, store, recipe_of(variants))
        assert precache.open(other.path).fields["image"].first_variant == 2
    explicit = recipe_of().to_dict()
    explicit["fields"]["image"]["first_variant"] = 0
    build_here(source, store, precache.Recipe.from_dict(explicit))
    assert precache.open(store).fields["image"].first_variant == 0


def test_a_sample_that_changed_is_named(source: Path, store: Path) -> None:
    path = source / "cat/0003.jpg"
    before = path.read_bytes()
    after = encoded(cut(77), quality=90)
    after += b"\0" * (len(before) - len(after))
    path.write_bytes(after[: len(before)])
    with pytest.raises(BuildError, match=r"cat/0003\.jpg.* not what it was"):
        precache.refresh(store, **SERIAL)
    build_here(source, store, precache.open(store).recipe)
    result = precache.refresh(store, **SERIAL)
    assert precache.verify(store).ok
    assert result.failed >= 1


def test_the_source_is_known_or_asked_for(
    source: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [commit] = read_log(LocalFolder(store)).commits
    assert commit.source == str(source)
    precache.pull(store, tmp_path / "copy")
    copy = str(tmp_path / "copy")
    assert main(["refresh", copy, "--address", "serial", "--no-progress"]) == 2
    assert "does not record the source of version" in capsys.readouterr().err
    given = ["--source", str(source), "--json", "--no-progress"]
    assert main(["refresh", copy, "--address", "serial", *given]) == 0
    assert json.loads(capsys.readouterr().out)["fields"]["image"]["first_variant"] == 1
    assert main(["refresh", copy, "--address", "serial", "--no-progress"]) == 0  # now it is known
    assert "variant 4 of image is new; there are variants 2 to 4" in capsys.readouterr().out


def test_a_source_that_was_moved_is_known_once_it_was_built_from(
    source: Path, store: Path, tmp_path: Path
) -> None:
    [before] = precache.versions(store).versions
    moved = source.rename(tmp_path / "moved")
    with pytest.raises(UsageError, match=r"was built from .*/in, which is not there any more"):
        precache.refresh(store, **SERIAL)
    built = build_here(moved, store, precache.open(store).recipe)
    assert built.version != before.version
    assert (built.shards_reused, precache.open(store).id) == (built.shards, built.version)
    refreshed = precache.refresh(store, **SERIAL)
    assert refreshed.version != built.version
    build_here(moved, store, precache.open(store).recipe)
    assert len(read_log(LocalFolder(store)).commits) == 3


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("s3://bucket/photos", "s3://bucket/photos"),
        ("python:package.module:factory", "python:package.module:factory"),
        ("https://user:secret@host/photos", None),
        ("https://host/photos?token=secret", None),
        ("photos", str(Path.cwd() / "photos")),
    ],
)
def test_credentials_are_not_kept(given: str, kept: str | None) -> None:
    assert recordable_source(given) == kept


def test_a_store_without_variants_says_how_to_get_them(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = precache.Recipe.image(resize=40, random_resized_crop=24, variants=1)
    build_here(source, tmp_path / "plain", plain)
    assert main(["refresh", str(tmp_path / "plain"), "--address", "serial"]) == 2
    assert "build with --variants 4" in capsys.readouterr().err
    with pytest.raises(StoreError, match="there is no store"):
        precache.refresh(tmp_path / "nowhere", **SERIAL)


class Drawings:
    """Samples that bring their labels."""

    def __len__(self) -> int:
        return 9

    @staticmethod
    def drawing(number: int) -> np.ndarray:
        return np.full((30, 30, 3), number * 20, np.uint8)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        return self.drawing(number), number % 4


class WithTargets(Drawings):
    targets = (0, 1, 2, 3, 0, 1, 2, 3, 0)


def drawings() -> Drawings:
    return Drawings()


def drawings_with_targets() -> Drawings:
    return WithTargets()


@pytest.mark.parametrize(
    ("factory", "later"),
    [
        ("drawings", (0,) * 9),
        ("drawings_with_targets", None),
        ("drawings_with_targets", (0,) * 9),
        ("drawings_with_targets", (0.5,) * 9),
    ],
)
def test_labels_that_came_with_samples_stay(
    factory: str, later: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"python:tests.driver.test_refresh:{factory}"
    recipe = precache.Recipe.image(random_resized_crop=24, variants=2)
    built = precache.build(source, tmp_path / "store", recipe, **SERIAL)
    before, labels = inodes(tmp_path / "store"), precache.open(built.path).labels
    with pytest.raises(UsageError, match=rf"names code .*{factory}'.* --run-functions"):
        precache.refresh(tmp_path / "store", **SERIAL)
    if later is not None:
        monkeypatch.setattr(Drawings, "__getitem__", lambda self, n: (Drawings.drawing(n), 7 - n))
        monkeypatch.setattr(WithTargets, "targets", later)
    precache.refresh(tmp_path / "store", run_functions=True, **SERIAL)
    assert inodes(tmp_path / "store")["image.1"] == before["image.1"]
    assert np.array_equal(precache.open(tmp_path / "store").labels, labels)
    assert sorted(labels) == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    [other] = {"drawings", "drawings_with_targets"} - {factory}
    same_samples = source.replace(f":{factory}", f":{other}")
    precache.refresh(tmp_path / "store", same_samples, run_functions=True, **SERIAL)
    assert np.array_equal(precache.open(tmp_path / "store").labels, labels)


# --- fields that draw alike -----------------------------------------------------------------------


@pytest.mark.parametrize("before", [(), ({"op": "resize", "size": [24, 24]},)])
def test_a_mask_that_is_added_after_a_refresh_has_the_draws_of_its_image(
    before: tuple[dict[str, Any], ...], tmp_path: Path
) -> None:
    """Whether the store had no mask, or one that was not drawn."""
    scenes = []
    for number in range(8):
        pixels = np.zeros((64, 64, 3), np.uint8)
        pixels[20:44, 10 + number : 30 + number] = 255
        scenes.append({"key": str(number), "image": pixels, "mask": pixels[..., 0] // 255})
    source, store = put_rows(tmp_path / "rows", scenes), tmp_path / "store"
    nearest = {"interpolation": "nearest"}
    crop = {"op": "random_resized_crop", "size": 24, **nearest}
    image = {"ops": [{"op": "decode"}, crop], "variants": 2}
    mask = {"ops": [{"op": "decode", "mode": "P"}, crop], "variants": 2}
    first = {"image": image}
    if before:
        first["mask"] = {"ops": [mask["ops"][0], *({**op, **nearest} for op in before)]}
    options: dict[str, Any] = {"address": "serial", "progress": False}
    precache.build(source, store, precache.Recipe.from_dict({"fields": first}), **options)
    precache.refresh(store, run_functions=True, **options)
    both = precache.Recipe.from_dict({"fields": {"image": image, "mask": mask}})
    precache.build(source, store, both, **options)
    with precache.Loader(store, 8, shuffle=False, device="cpu") as loader:
        for batch in (*loader, *loader):
            assert torch.equal(batch["image"][:, 0] > 0, batch["mask"].reshape(8, 24, 24) > 0)
