"""ArrayRecord files: records, changes, and hostile files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from tfrecord import TFRecordWriter

from precache.errors import FetchError, SampleError, SourceError, UsageError
from precache.storage.open import open_folder
from precache_workers.sources.base import Sample
from precache_workers.sources.contract import check_source
from precache_workers.sources.kinds import open_source
from tests.support.building import cut, encoded
from tests.support.servers import S3Server

PHOTOS = [encoded(cut(number)) for number in range(40)]


def write(path: Path, records: list[bytes], options: str = "group_size:1") -> str:
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def test_records_may_be_images(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "a.array_record", PHOTOS, "group_size:7"))
    table = check_source(source).table
    assert table.keys[39] == "a.array_record/39"
    for photo, one in zip(PHOTOS, source.fetch(table.keys, [-1] * 40), strict=True):
        assert isinstance(one, Sample)
        assert one.inputs == {"bytes": photo}


def test_a_record_that_is_no_example_is_a_hole_unless_it_is_the_first(tmp_path: Path) -> None:
    example = TFRecordWriter.serialize_tf_example({"image": (PHOTOS[0], "byte")})
    source = open_source(write(tmp_path / "a.array_record", [example, b"?", example]))
    table = source.list(lambda count: None).table
    fetched = source.fetch(table.keys, table.sizes.tolist(), table.locations)
    assert [type(one) for one in fetched] == [Sample, SampleError, Sample]
    write(tmp_path / "a.array_record", [b"?", example])
    with pytest.raises(SourceError, match="in its first record, "):
        source.list(lambda count: None)


def test_a_file_that_changed_after_listing_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.array_record"
    source = open_source(write(path, PHOTOS[:3]))
    table = source.list(lambda count: None).table
    os.utime(path, (1, 1))
    for error in source.fetch(table.keys, table.sizes.tolist(), table.locations):
        assert isinstance(error, FetchError)
        assert "has changed since it was listed" in str(error)


def test_a_damaged_record_is_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "a.array_record"
    source = open_source(write(path, PHOTOS, "group_size:1,uncompressed"))
    data = bytearray(path.read_bytes())
    data[data.index(PHOTOS[17]) + 300] ^= 1
    path.write_bytes(data)
    table = source.list(lambda count: None).table
    fetched = source.fetch(table.keys, table.sizes.tolist(), table.locations)
    assert [n for n, one in enumerate(fetched) if not isinstance(one, Sample)] == [17]
    assert "its record is damaged" in str(fetched[17])


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.array_record"
    source = write(path, PHOTOS)
    data = path.read_bytes()
    for length in (0, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(SourceError, match=r"a\.array_record cannot be read: \S"):
            open_source(source).list(lambda count: None)


def test_a_file_in_a_bucket_is_refused_with_the_way_out(tmp_path: Path, s3: S3Server) -> None:
    write(tmp_path / "a.array_record", PHOTOS[:1])
    bucket = open_folder("s3://bucket", s3.options())
    bucket.put("a.array_record", [(tmp_path / "a.array_record").read_bytes()])
    with pytest.raises(SourceError, match="which is read from a disk; copy it there"):
        open_source("s3://bucket/a.array_record", s3.options()).list(lambda count: None)


def test_without_its_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.array_record", PHOTOS[:1])
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(UsageError, match=r"pip install 'precache\[arrayrecord\]'"):
        open_source(source).list(lambda count: None)
