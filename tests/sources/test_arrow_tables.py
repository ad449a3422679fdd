"""Arrow files, as `save_to_disk` writes them: splits, columns, offsets, and hostile files."""

import os
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from precache.errors import SampleError, SourceError
from precache_workers.sources.base import Columns, Sample
from precache_workers.sources.kinds import open_source
from tests.support.building import ask, cut, encoded, growth
from tests.support.containers import listed, quiet_datasets, write_table
from tests.support.source_contract import check_source

PHOTO = encoded(cut(0))
IMAGE = {"bytes": PHOTO, "path": None}


def photo_dataset(count: int, **columns: Any) -> datasets.Dataset:
    images = [{"bytes": encoded(cut(n)), "path": f"{n}.jpg"} for n in range(count)]
    data = datasets.Dataset.from_dict({"image": images, **columns})
    return data.cast_column("image", datasets.Image())


def put(path: Path, table: pa.Table, *, file: bool = False, **options: Any) -> Path:
    new = pa.ipc.new_file if file else pa.ipc.new_stream
    return Path(write_table(path, table, new=new, rows=3, **options))


# --- saved datasets -----------------------------------------------------------------------------


def test_all_splits_are_read_or_the_one_that_is_named(tmp_path: Path) -> None:
    classes = datasets.ClassLabel(names=["cat", "dog"])
    data = photo_dataset(7, kind=[0, 1, 1, -1, 0, 1, 0]).cast_column("kind", classes)
    with quiet_datasets():
        splits = datasets.DatasetDict(train=data.select(range(2, 7)), test=data.select([1, 0]))
        splits.save_to_disk(tmp_path / "saved", num_shards={"train": 2, "test": 1})
    listing = check_source(open_source(str(tmp_path / "saved")))
    assert listing.table.classes == ("cat", "dog")
    assert listing.table.labels.tolist() == [1, -1, 0, 1, 0, 1, 0]
    assert listing.table.keys[0] == "train/data-00000-of-00002.arrow/2.jpg"
    alone = "to take them alone, name it as the source"
    assert listing.notes[1:] == (f"5 samples in train/; {alone}", f"2 samples in test/; {alone}")
    assert listing.doubts[0].of_members
    assert len(listed(tmp_path / "saved/test").table) == 2


def test_a_selection_and_renamed_columns_are_read_as_they_are(tmp_path: Path) -> None:
    data = photo_dataset(5, id=list("abcde"), extra=[[1], [], None, [2, 3], [4]])
    with quiet_datasets():
        data = data.select([4, 0, 2]).rename_column("image", "scan")
        data.save_to_disk(tmp_path / "saved")
    [saved] = (tmp_path / "saved").glob("*.arrow")
    shutil.copy(saved, saved.with_name("cache-0123456789abcdef.arrow"))  # is no part of it
    opened = open_source(str(tmp_path / "saved"), columns=Columns(key="id"))
    assert list(check_source(opened).table.keys) == ["e", "a", "c"]
    [sample] = opened.fetch(["c"], [-1])
    assert isinstance(sample, Sample)
    assert sample.inputs == {"bytes": encoded(cut(2))}


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"_data_files": 1}', '{"_data_files": []}',
        '{"_data_files": [{"filename": "../a.arrow"}]}',
        '{"_data_files": [{"filename": "/etc/passwd"}]}',
        '{"_data_files": [{"filename": "a"}], "_indices_data_files": [{"filename": "b"}]}',
    ],
)  # fmt: skip
def test_damaged_documents_and_selections_of_old_versions_are_refused(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "state.json").write_text(text)
    (tmp_path / "a.jpg").write_bytes(PHOTO)
    assert list(listed(tmp_path).table.keys) == ["a.jpg"], "without the other, it is a folder"
    (tmp_path / "dataset_info.json").write_text("{}")
    damaged = r"state\.json that is damaged|names the files"
    why = "load it and save it again" if "_indices" in text else damaged
    with pytest.raises(SourceError, match=why):
        listed(tmp_path)


# --- Arrow files --------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "old"), [(False, False), (True, False), (False, True)])
def test_columns_of_many_types_do_not_move_the_images(
    tmp_path: Path, file: bool, old: bool
) -> None:
    count, labels = 8, ["a class with a long name" if c == "a" else c for c in "badacbab"]
    table = pa.table(
        {
            "nothing": pa.nulls(count),
            "flag": [True, None] * 4,
            "price": pa.array([1, 2] * 4, pa.decimal128(9, 2)),
            "tags": [["a", "b"], [], None, ["c"]] * 2,
            "pair": pa.array([[1.0, 2.0]] * count, pa.list_(pa.float32(), 2)),
            "map": pa.array([[("k", 1)]] * count, pa.map_(pa.string(), pa.int8())),
            "hash": pa.array([b"0123"] * count, pa.binary(4)),
            "text": pa.array(["a"] * count, pa.string_view()),
            "runs": pa.array([[{"x": 1}]] * count),
            "image": pa.array(
                [{"path": f"{n}", "other": [n], "bytes": encoded(cut(n))} for n in range(count)],
                pa.struct(
                    {"path": pa.string(), "other": pa.list_(pa.int8()), "bytes": pa.large_binary()}
                ),
            ),
            "label": pa.array(labels, pa.large_string() if file else pa.string_view()),
        }
    )
    path = put(tmp_path / "a.arrow", table, file=file, use_legacy_format=old)
    source = open_source(str(path))
    listing = check_source(source)
    assert listing.table.keys[7] == "a.arrow/7"
    for n, sample in enumerate(source.fetch(listing.table.keys, [-1] * count)):
        assert isinstance(sample, Sample)
        assert sample.inputs == {"bytes": encoded(cut(n))}
    names = [listing.table.classes[number] for number in listing.table.labels]
    assert names == labels


def test_a_row_without_an_image_is_a_hole(tmp_path: Path) -> None:
    images = [None, IMAGE, {"bytes": None, "path": "/photos/a.jpg"}]
    source = open_source(str(put(tmp_path / "a.arrow", pa.table({"image": images}))))
    table = source.list(lambda count: None).table
    fetched = source.fetch(table.keys, table.sizes.tolist(), table.locations)
    assert [type(one) for one in fetched] == [SampleError, Sample, SampleError]
    assert str(fetched[0]) == "its row has no image"


def test_listing_takes_no_memory_for_the_images(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    images = pa.array([bytes(16 << 20)] * 8, pa.large_binary())
    write_table(path, {"image": images})
    assert ask(growth, listed, str(path)) < 64 << 20
    locations = listed(path).table.locations
    assert locations is not None
    assert np.allclose(locations.nbytes, 16 << 20, rtol=0.01)


@pytest.mark.parametrize("file", [False, True])
def test_batches_may_be_compressed_and_are_units_then(tmp_path: Path, file: bool) -> None:
    table = pa.table({"image": [encoded(cut(n)) for n in range(7)], "label": list("abacabc")})
    plain = open_source(str(put(tmp_path / "a.arrow", table, file=file)))
    path = put(tmp_path / "zstd/a.arrow", table, file=file, compression="zstd")
    packed = open_source(str(path))
    listing, other = check_source(packed), check_source(plain)
    assert [*listing.table.keys] == [*other.table.keys]
    assert listing.table.labels.tolist() == other.table.labels.tolist()
    assert listing.table.locations is not None
    assert listing.table.locations.units.tolist() == [0, 0, 0, 1, 1, 1, 2]
    keys = listing.table.keys
    assert packed.fetch(keys, [-1] * 7) == plain.fetch(keys, [-1] * 7)


def test_batches_with_dictionaries_are_refused(tmp_path: Path) -> None:
    table = pa.table({"image": [PHOTO] * 3, "label": list("aba")})
    coded = table.set_column(1, "label", table["label"].combine_chunks().dictionary_encode())
    put(tmp_path / "b.arrow", coded)
    with pytest.raises(SourceError, match=r"b\.arrow has dictionaries.*or as Parquet"):
        listed(tmp_path / "b.arrow")


# --- hostile files ------------------------------------------------------------------------------


def test_a_stream_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    table = pa.table({"image": [PHOTO] * 7})
    path = put(tmp_path / "a.arrow", table)
    data = path.read_bytes()
    end = data.rindex(PHOTO) + len(PHOTO)
    for length in (0, 3, 8, 40, end // 2, end - 1, end):
        path.write_bytes(data[:length])
        with pytest.raises(SourceError, match=r"a\.arrow (is cut off|cannot be read)"):
            listed(path)


def _read_while_cut(path: Path) -> list[str]:
    """Errors of listing and reading a file that is cut short after its first batch was found."""
    opened, whole, read = open_source(str(path)), path.read_bytes(), pa.ipc.read_record_batch
    table, errors = opened.list(lambda count: None).table, list[str]()

    def cut_and_read(*arguments: Any) -> Any:
        os.truncate(path, 5000)
        return read(*arguments)

    pa.ipc.read_record_batch = cut_and_read
    errors += [str(one) for one in opened.fetch(table.keys, [-1] * len(table), table.locations)]
    path.write_bytes(whole)
    try:
        opened.list(lambda count: None)
    except SourceError as error:
        errors.append(str(error))
    return errors


def test_a_file_that_is_cut_short_while_it_is_read_ends_no_process(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    labels = [[*generator.bytes(9000)] for _ in range(3)]
    columns = {"image": [generator.bytes(9000) for _ in range(3)], "tokens": labels}
    path = put(tmp_path / "a.arrow", pa.table(columns))
    *fetched, listed_error = ask(_read_while_cut, path)
    assert len(fetched) == 3
    assert all("has changed since it was listed" in error for error in fetched)
    assert "a.arrow is cut off" in listed_error
