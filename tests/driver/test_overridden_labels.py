"""Labels of a request, which override those of a Python dataset."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from tests.support import building
from tests.support.building import write, write_jpegs

OWN, GIVEN = [1, 2, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2]
RENUMBERED = [2, 0, 1, 2, 0, 1]  # own ones, by the class map
RECIPE = precache.Recipe.from_dict({"fields": {"image": {"ops": []}}})


class Bare:
    """A dataset whose labels come with its samples."""

    classes = ("ant", "bee", "cat")

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Any:
        return np.full((24, 24, 3), number, np.uint8), OWN[number]


class Photos(Bare):
    targets: Any = OWN


class Unlabelled(Photos):
    def __getitem__(self, number: int) -> Any:
        return super().__getitem__(number)[0]


BARE, PHOTOS, UNLABELLED = (
    f"python:{__name__}:{name}" for name in ("Bare", "Photos", "Unlabelled")
)


@pytest.fixture(autouse=True)
def lists(tmp_path: Path) -> None:
    write(tmp_path / "classes.txt", b"cat\nant\nbee\n")
    write(tmp_path / "labels.csv", "".join(f"{n},{v}\n" for n, v in enumerate(GIVEN)).encode())


def options(tmp_path: Path, kind: str) -> dict[str, Any]:
    given = {"classes": "classes.txt", "labels": "labels.csv"}
    return {kind: str(tmp_path / given[kind])} if kind in given else {}


build = functools.partial(building.build, recipe=RECIPE)


def labels_of(path: str) -> list[int]:
    version = precache.open(path)
    by_key = dict(zip(map(int, version.keys), version.labels.tolist(), strict=True))
    return [by_key[number] for number in range(len(by_key))]


def test_the_labels_of_a_version_do_not_depend_on_which_build_came_first(tmp_path: Path) -> None:
    kinds, versions = ["plain", "classes", "labels"], set()
    for turn in range(3):
        order = [*kinds[turn:], *kinds[:turn]]
        store = tmp_path / f"{turn}.store"
        results = {kind: build(PHOTOS, store, **options(tmp_path, kind)) for kind in order}
        found = {kind: labels_of(result.path) for kind, result in results.items()}
        assert found == {"plain": OWN, "classes": RENUMBERED, "labels": GIVEN}
        versions.add(tuple(results[kind].version for kind in kinds))
    [(one, other, third)] = versions
    assert one != other != third != one


@pytest.mark.parametrize(
    ("kind", "source", "labels"),
    [("classes", PHOTOS, RENUMBERED), ("labels", PHOTOS, GIVEN), ("labels", BARE, GIVEN)],
)
def test_a_build_that_was_begun_with_other_labels_is_not_resumed(
    kind: str, source: str, labels: list[int], tmp_path: Path
) -> None:
    """Lost or other labels are found, and made those of the request again."""
    store = tmp_path / "a.store"
    plain = build(source, store)
    (Path(plain.path) / "zarr.json").unlink()
    given = build(source, store, **options(tmp_path, kind))
    assert labels_of(given.path) == labels
    plain = build(source, store)
    assert labels_of(plain.path) == OWN
    (Path(plain.path) / "label/c/0").unlink()
    assert not precache.verify(store).ok
    build(source, store)
    assert labels_of(plain.path) == OWN
    build(source, store, **options(tmp_path, kind))
    found = precache.verify(store)
    assert (found.ok, found.unchecked) == (True, ())
    chunk = Path(given.path) / "label/c/0"
    for data in (None, (Path(plain.path) / "label/c/0").read_bytes()):
        chunk.unlink()
        if data:
            chunk.write_bytes(data)
        assert [damage.shard for damage in precache.verify(store).damage] == ["label/c/0"]
        build(source, store, **options(tmp_path, kind))
        assert labels_of(given.path) == labels
    (Path(given.path) / "rows/size/c/0").unlink()
    build(source, store, **options(tmp_path, kind))
    assert precache.verify(store).ok


@pytest.mark.parametrize(
    ("targets", "fingerprint"),
    [
        ([0.5, 1.5, 2.5, 3.5, 4.5, 5.5], None),
        ([[0, 1], [0], [1], [1, 2], [], [2]], None),
        (OWN, lambda self, number: "same"),
        (None, lambda self, number: str(number)),
    ],
    ids=["numbers", "several", "one fingerprint", "fingerprints"],
)
def test_labels_of_a_request_are_verified_whatever_the_targets_are(
    targets: Any, fingerprint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unlabelled, "targets", targets)
    if fingerprint is not None:
        monkeypatch.setattr(Unlabelled, "fingerprint", fingerprint, raising=False)
    source, store, given = UNLABELLED, tmp_path / "a.store", options(tmp_path, "labels")
    built = build(source, store, **given)
    assert labels_of(built.path) == GIVEN
    (tmp_path / "labels.csv").write_text("".join(f"{n},{2 - n % 3}\n" for n in range(6)))
    other = build(source, store, **given)
    assert precache.verify(other.path).ok
    chunk = Path(other.path) / "label/c/0"
    data = (Path(built.path) / "label/c/0").read_bytes()
    chunk.unlink()
    chunk.write_bytes(data)
    assert [damage.shard for damage in precache.verify(other.path).damage] == ["label/c/0"]
    build(source, store, **given)
    assert labels_of(other.path) == [2, 1, 0, 2, 1, 0]


@pytest.mark.parametrize(
    ("source", "kind", "why"),
    [
        (PHOTOS, "classes", "names or numbers of classes changed"),
        (BARE, "labels", "labels: class numbers that come with the samples → class numbers"),
    ],
)
def test_other_labels_decode_nothing_and_a_plan_says_why(
    source: str, kind: str, why: str, tmp_path: Path
) -> None:
    store = tmp_path / "a.store"
    build(source, store)
    plan = precache.plan(source, store, RECIPE, **options(tmp_path, kind))
    assert why in str(plan)
    assert (plan.shards_reused, plan.rows_computed) == (plan.shards, 0)
    result = build(source, store, **options(tmp_path, kind))
    assert result.shards_reused == plan.shards


def test_a_refresh_keeps_labels_of_a_request(tmp_path: Path) -> None:
    store = tmp_path / "a.store"
    recipe = precache.Recipe.image(random_resized_crop=16, variants=2)
    given = options(tmp_path, "labels")
    build(PHOTOS, store, recipe=recipe, **given)
    result = precache.refresh(store, run_functions=True, address="serial")
    assert labels_of(result.path) == GIVEN
    assert precache.verify(store).ok
    same = build(PHOTOS, store, recipe=recipe, **given)
    assert same.version == result.version


def test_other_sources_have_the_same_ids_with_labels_of_a_request_and_without(
    tmp_path: Path,
) -> None:
    source = write_jpegs(tmp_path / "in", 6, classes=("ant", "bee"))
    (tmp_path / "classes.json").write_text(json.dumps(["ant", "bee"]))
    recipe = precache.Recipe.image(resize=40, crop=32)
    plain = build(source, tmp_path / "a.store", recipe=recipe)
    given = build(source, tmp_path / "b.store", recipe=recipe, classes=tmp_path / "classes.json")
    assert plain.version == given.version
