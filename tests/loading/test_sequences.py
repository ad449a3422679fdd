"""Loaders of rows that differ in length: forms, positions, ranks, mixtures, devices, refusals."""

import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import precache
from precache import Reading
from precache.codecs import kernels
from precache.errors import DamageError
from precache.loading.options import Block, Buckets
from precache.runtime import usage
from precache.sampling.order import BucketPermutation, buckets_of
from precache.store.open import open_version
from precache.transforms import ColorJitter, Compose, HorizontalFlip, RandomCrop, ToDType
from tests.support.building import flip
from tests.support.forging import forge_head, forge_shape, settle
from tests.support.kinds import expected, put_rows, recipe, row
from tests.support.loaders import assert_any_history, assert_refused, opened

ROWS = 23
OPTIONS: dict[str, Any] = {"seed": 3}
SERIAL: dict[str, Any] = {"address": "serial", "shard_samples": 4, "progress": False}


def build(store: Path, *names: str, rows: Any = None, **changes: Any) -> Path:
    source = put_rows(store.parent / "rows.pickle", rows or [row(n) for n in range(ROWS)])
    precache.build(source, store, recipe(*names, **changes), **SERIAL)
    return store


@pytest.fixture(scope="module", params=["zstd", "raw"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    codec = {"codec": request.param}
    changes = dict.fromkeys(("caption", "blob", "tokens", "points", "boxes"), codec)
    return build(tmp_path_factory.mktemp("sequences") / "store", **changes)


Step = tuple[list[int], list[str], list[list[int]]]


def steps(loader: Any) -> list[Step]:
    """Rows, texts and tokens of each batch that is left."""
    return [(b["row"].tolist(), b["caption"], tokens_of(b)) for b in loader]


def tokens_of(batch: dict[str, Any]) -> list[list[int]]:
    tokens = batch["tokens"]
    if "tokens.length" in batch:
        tokens = [row[:n] for row, n in zip(tokens, batch["tokens.length"], strict=True)]
    return [row.tolist() for row in (tokens.unbind() if torch.is_tensor(tokens) else tokens)]


# --- forms --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "options", "compiled"),
    [
        ("padded", {}, True),
        ("padded", {"reading": Reading(access="pread")}, False),
        ("jagged", {"reading": Reading(num_threads=3)}, True),
        ("list", {"reading": Reading(num_threads=3, access="pread")}, True),
    ],
)
def test_each_form_has_the_rows(
    form: str, options: dict[str, Any], compiled: bool, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "compiled", kernels.Compiled)
    forms: Any = {"tokens": form, "points": form}
    seen = set()
    with opened(store, 5, output=forms, **OPTIONS, **options) as loader:
        for batch in loader:
            tokens, points = tokens_of(batch), batch["points"]
            if form == "padded":
                lengths = batch["points.length"]
                assert lengths.dtype == torch.int64
                points = [p[:n] for p, n in zip(points, lengths, strict=True)]
            else:
                assert "points.length" not in batch
                points = points.unbind() if form == "jagged" else points
            for place, key in enumerate(loader.keys(batch["row"])):
                wanted = expected(row(int(key.split()[1])))
                assert batch["caption"][place] == wanted["caption"]
                assert batch["blob"][place] == wanted["blob"]
                assert tokens[place] == wanted["tokens"].tolist()
                np.testing.assert_array_equal(points[place].numpy(), wanted["points"])
                seen.add(key)
    assert len(seen) == ROWS


def test_a_batch_of_empty_rows_has_no_length(tmp_path: Path) -> None:
    rows = [row(n, tokens=[]) for n in range(4)] + [row(5, tokens=[1])]
    store = build(tmp_path / "store", "tokens", rows=rows)
    chosen = [n for n, key in enumerate(precache.open(store).keys) if key != "row 5"]
    for form, shape in (("padded", (4, 0)), ("list", (0,))):
        with opened(store, 4, rows=chosen, output={"tokens": form}) as loader:
            [batch] = loader
        tokens = batch["tokens"] if form == "padded" else batch["tokens"][0]
        assert tuple(tokens.shape) == shape


# --- positions, ranks, orders -------------------------------------------------------------------

SHUFFLES = [True, "block", Block(2), Buckets("tokens", 3), Buckets("caption"), False]


@pytest.mark.parametrize(
    "shuffle",
    [
        True,
        "block",
        Buckets("tokens", 3),
        *(pytest.param(s, marks=pytest.mark.heavy) for s in (Block(2), Buckets("caption"), False)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "store", ["raw", pytest.param("zstd", marks=pytest.mark.heavy)], indirect=True
)
@settings(max_examples=8)
@given(data=st.data())
def test_any_history_of_a_loop_reads_what_its_position_says(
    shuffle: Any, data: st.DataObject, store: Path
) -> None:
    options = {**OPTIONS, "shuffle": shuffle}
    with opened(store, 6, **options) as loader:
        epochs = [steps(loader) for _ in range(8)]
    make = functools.partial(opened, store, 6, **options)
    assert_any_history(data, make, epochs.__getitem__, steps)


@pytest.mark.parametrize("shuffle", SHUFFLES, ids=str)
def test_ranks_share_the_rows_of_a_step(shuffle: Any, store: Path) -> None:
    options = {**OPTIONS, "shuffle": shuffle}
    with opened(store, 6, **options) as loader:
        first, second = steps(loader), steps(loader)
    assert sorted(n for rows, *_ in first for n in rows) == list(range(ROWS))
    assert (first == second) == (shuffle is False)
    if isinstance(shuffle, Buckets):  # whose state needs the same rows a step
        with opened(store, 4, **options) as other:
            assert_refused(("shuffle", other.load_state_dict, loader.state_dict()))
    ranks = []
    for rank in range(2):
        with opened(store, 3, rank=rank, world_size=2, **options) as loader:
            ranks.append(steps(loader))
    for whole, *parts in zip(first, *ranks, strict=True):
        joined = [list(itertools.chain(*column)) for column in zip(*parts, strict=True)]
        assert [column[: len(whole[0])] for column in joined] == list(whole)


def _padding(lengths: np.ndarray) -> float:
    batches = lengths[: len(lengths) // 256 * 256].reshape(-1, 256)
    return float((batches.max(1, keepdims=True) - batches).sum())


def test_buckets_leave_little_to_pad_and_take_each_row_once() -> None:
    """Of lengths drawn as those of captions and of texts: the share of what a shuffle pads."""
    random = np.random.default_rng(0)
    for mean, sigma in ((2.5, 0.5), (5.5, 0.6), (5.5, 1)):
        lengths = np.clip(random.lognormal(mean, sigma, 50_000), 1, 2048).astype(np.int64)

        order = BucketPermutation(buckets_of(lengths, 8), 256, 1, 0)(np.arange(len(lengths)))
        assert (np.sort(order) == np.arange(len(lengths))).all()
        shuffled = _padding(lengths[random.permutation(len(lengths))])
        assert _padding(lengths[order]) <= 0.1 * shuffled
        firsts = lengths[order[::256]]
        assert abs(np.corrcoef(firsts[:-1], firsts[1:])[0, 1]) < 0.3, "batches come in random order"


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_no_other_ends_of_buckets_leave_less_to_pad(count: int) -> None:
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(0, 9, 12)
        tops = np.unique(lengths)
        ways = itertools.combinations_with_replacement(tops, min(count, len(tops)) - 1)
        longest = [np.append(way, tops[-1])[np.searchsorted(way, lengths)].sum() for way in ways]
        buckets = buckets_of(lengths, count)
        assert min(longest) == sum(lengths[buckets == n].max() for n in buckets)
        assert len({*buckets.tolist()}) <= count


def test_a_bucket_of_a_cloud_gives_the_rows_of_the_disk(store: Path, tmp_path: Path) -> None:
    far = f"memory://sequences-{tmp_path.name}"
    precache.push(store, far)
    cached: dict[str, Any] = {"cache": tmp_path / "cache", "shuffle": "full"}
    read = []
    for uri, options in ((store, {}), (far, {}), (far, cached)):
        with opened(uri, 6, **OPTIONS, **options) as loader:
            read.append(steps(loader))
    assert read[0] == read[1] == read[2]


def test_a_training_follows_a_build_of_texts(tmp_path: Path) -> None:
    source = put_rows(tmp_path / "rows.pickle", [row(n) for n in range(ROWS)])
    version = precache.ensure(source, tmp_path / "store", recipe(), follow=True, **SERIAL)
    with opened(version, 5, **OPTIONS) as loader:
        for _ in range(2):
            pairs = [zip(rows, captions, strict=True) for rows, captions, _ in steps(loader)]
            seen = dict(itertools.chain(*pairs))
            assert len(seen) == ROWS
            for number, caption in seen.items():
                assert caption == row(int(loader.version.keys[number].split()[1]))["caption"]


def test_refresh_reads_the_next_version(tmp_path: Path) -> None:
    store = build(tmp_path / "store", "caption", "tokens")
    with opened(store, 30, refresh="epoch") as loader:
        [(_, before, _)] = steps(loader)
        build(store, "caption", "tokens", rows=[row(n, caption=f"new {n}") for n in range(ROWS)])
        [(_, after, _)] = steps(loader)
    assert {text.startswith("new") for text in before} == {False}
    assert {text.startswith("new") for text in after} == {True}


def test_texts_and_padded_rows_are_mixed(store: Path) -> None:
    loaders = [opened(store, size, **OPTIONS) for size in (5, 3)]
    keys = loaders[0].version.keys
    with precache.mix(loaders, until=4) as mixture:
        for rows, captions, tokens in steps(mixture):
            wanted = [row(int(keys[number].split()[1])) for number in rows]
            assert captions == [each["caption"] for each in wanted]
            assert tokens == [each["tokens"] for each in wanted]


# --- transforms ---------------------------------------------------------------------------------


def test_transforms_pass_texts_and_lengths_through(store: Path) -> None:
    image: dict[str, Any] = {"fields": ("image",)}
    moves = [RandomCrop(9, **image), HorizontalFlip(**image)]
    change = Compose([*moves, ToDType(**image), ColorJitter(0.1)])
    with opened(store, 5, **OPTIONS) as loader:
        plain = steps(loader)
    with opened(store, 5, transform=change, **OPTIONS) as loader:
        [*changed] = loader
    assert steps(changed) == plain
    assert changed[0]["image"].shape == (5, 3, 9, 9)


@pytest.mark.parametrize("form", ["padded", "jagged", "list"])
def test_tokens_stay_behind_a_crop_and_points_do_not(form: Any, store: Path) -> None:
    crop = {"transform": RandomCrop(9), **OPTIONS}
    tokens = {"fields": ["image", "caption", "tokens"], "output": {"tokens": form}}
    with opened(store, 5, **tokens, **crop) as loader:
        assert next(iter(loader))["image"].shape == (5, 3, 9, 9)
    points = {"fields": ["image", "points"], "output": {"points": form}}
    assert_refused(
        ("points would stay behind", functools.partial(opened, store, 5, **points, **crop))
    )


# --- refusals -----------------------------------------------------------------------------------


REFUSED: list[tuple[str, Any, str]] = [
    (
        "reading",
        Reading(resident="host"),
        r"resident='host' takes rows of one shape.* fields=\('image', 'label'\)",
    ),
    ("reading", Reading(decompress="device"), "decompress='device' takes rows of one shape"),
    ("output", "tuple", "output='tuple' takes rows of one shape"),
    ("output", {"caption": "list"}, "output names 'caption'.*those are tokens, points"),
    ("output", {"image": "list"}, "output names 'image'"),
    ("output", {"tokens": "nested"}, r"output\['tokens'\] is 'nested'; choose one of padded"),
    ("output", "list", "output is 'list'; choose one of dict, tuple"),
    ("shuffle", Buckets("image"), "differ in length are: caption, blob, tokens"),
]


def test_what_takes_rows_of_one_shape_is_refused_and_without_others_taken(store: Path) -> None:
    for name, value, said in REFUSED:
        assert_refused((said, functools.partial(opened, store, 5, **{name: value})))
    for count in (0, 1 << 15, "many"):
        assert_refused(("count is", Buckets, "tokens", count))
    for options in ({"reading": Reading(resident="host")}, {"output": "tuple"}):
        with opened(store, 5, fields=("image", "label"), **options) as loader:
            assert len(list(loader)) == -(-ROWS // 5)


def test_batches_that_do_not_fit_the_memory_are_refused(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store, 5, fields=("tokens",), **OPTIONS) as loader:
        [reader] = loader._source.reader.sequences.values()
        packed = reader.packed
        monkeypatch.setattr(usage, "LARGE_NBYTES", 1)
        monkeypatch.setattr(usage, "available_bytes", lambda: 1)
        assert_refused(("rows of tokens take", next, iter(loader)))
        monkeypatch.setattr(usage, "available_bytes", lambda: 1 << 30)
        rows = packed(np.arange(5))
        monkeypatch.setattr(reader, "packed", lambda _: rows)
        monkeypatch.setattr(usage, "available_bytes", lambda: 1)
        assert_refused(("'list'} to a", next, iter(loader)))


def _read(store: Path) -> None:
    with opened(store, 5, **OPTIONS) as loader:
        list(loader)


FORGED = {
    "another width": ("points", (2, 7), "has the shape"),
    "a huge row": ("tokens", (2**31 - 1,), "has the shape"),
    "a large row": ("tokens", (2**27,), "is damaged at row"),
    "a negative length": ("caption", (-1,), "has the shape"),
    "a shorter row": ("caption", (1,), "is damaged at row"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_lengths_are_refused_before_memory_is_taken(
    name: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, shape, message = FORGED[name]
    copy = Path(shutil.copytree(store, tmp_path / "store"))
    forge_shape(Path(precache.open(copy).path), array, 6, shape)
    made = []
    monkeypatch.setattr(
        np, "empty", lambda *a, _empty=np.empty, **o: made.append(a[0]) or _empty(*a, **o)
    )
    with pytest.raises(DamageError, match=message):
        _read(copy)
    assert max(np.prod(size) for size in made) < 1 << 25


def test_damage_is_named_by_shard_and_key(tmp_path: Path) -> None:
    store = build(tmp_path / "store", "caption", caption={"codec": "raw"})
    _read(store)
    harms: list[Callable[[Path], None]] = [
        lambda version: flip(version / "caption/c/0", 0.1),
        lambda version: forge_head(version, "caption", b"\2"),  # of two rows
        lambda version: forge_head(version, "caption", b"\1\0\0\0\1"),  # of another length
    ]
    for number, harm in enumerate(harms):
        copy = shutil.copytree(store, tmp_path / str(number))
        harm(Path(precache.open(copy).path))
        assert_refused((r"caption/c/0 is damaged at row .*'row ", _read, copy), error=DamageError)


def test_a_text_that_is_no_utf8_is_damage(tmp_path: Path) -> None:
    """As in a store of bytes that is forged into one of texts."""
    store = build(tmp_path / "store", "blob", rows=[row(n, blob=b"\xff\xfe") for n in range(4)])
    root = Path(precache.open(store).path) / "zarr.json"
    root.write_bytes(root.read_bytes().replace(b'"kind": "bytes"', b'"kind": "text"'))
    settle(root.parent)
    assert open_version(store).kind("blob") == "text"
    assert_refused(("no UTF-8", _read, store), error=DamageError)
