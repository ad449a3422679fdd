"""Tables of URIs: formats, columns, labels, where files may lie, and what is refused."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.errors import FetchError, HangError, SourceError
from precache.storage.base import REPEATED
from precache.storage.open import open_folder
from precache_workers.runtime.time_limit import run_in_time
from precache_workers.sources import manifests
from precache_workers.sources.base import Columns, Sample
from precache_workers.sources.kinds import open_source
from precache_workers.sources.tables import LONGEST_LINE
from tests.support.building import cut, encoded, labels, pixels, write
from tests.support.containers import class_of, listed, write_table
from tests.support.servers import S3Server, web_server
from tests.support.source_contract import check_source

RECIPE = precache.Recipe.image(resize=40, crop=32)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(6):
        write(tmp_path / f"in/{number}.jpg", encoded(cut(number)))
    return tmp_path


def table(folder: Path, text: str, name: str = "list.csv") -> str:
    write(folder / name, text.encode())
    return str(folder / name)


URIS, LABELS = [f"in/{number}.jpg" for number in range(3)], ["dog", None, "cat"]


@pytest.mark.parametrize("name", ["list.csv", "list.tsv", "list.jsonl", "list.parquet"])
def test_every_format_names_the_same_samples(photos: Path, name: str) -> None:
    source = Path(write_table(photos / name, {"path": URIS, "label": LABELS}))
    mark, end = {".csv": ("\ufeff", ""), ".jsonl": ("", "\n\n")}.get(source.suffix, ("", ""))
    source.write_bytes(mark.encode() + source.read_bytes() + end.encode())
    kind = "manifest" if name.endswith(".parquet") else None
    listing = check_source(open_source(str(source), kind=kind))
    assert class_of(listing) == dict(zip(URIS, LABELS, strict=True))
    assert listing.table.sizes[0] == (photos / "in/0.jpg").stat().st_size
    assert listing.notes == ("URIs from the column 'path', labels from 'label'",)


def test_columns_are_chosen_by_name(photos: Path) -> None:
    text = "id,path,where,kind\na,x,in/0.jpg,1\nb,y,in/1.jpg,0\n"
    source = open_source(table(photos, text), columns=Columns("where", "kind", "id"))
    listing = check_source(source)
    assert list(listing.table.keys) == ["a", "b"]
    assert listing.table.labels.tolist() == [1, 0]
    assert listing.notes[0].endswith("; not used: 'path'")


@pytest.mark.parametrize(
    ("values", "expected", "classes"),
    [
        (["10", None, "9"], [0, -1, 1], ("10", "9")),
        ([10, None, 9], [10, -1, 9], ()),
        ([1.5, None, 2.0], [1.5, None, 2.0], ()),
        ([["b"], None, ["a", "b"]], [[0, 1], [0, 0], [1, 1]], ("a", "b")),
    ],
)
def test_labels_of_parquet_are_taken_by_type(
    photos: Path, values: list[Any], expected: list[Any], classes: tuple[str, ...]
) -> None:
    source = write_table(photos / "list.parquet", {"path": URIS, "label": values})
    rows = check_source(open_source(source, kind="manifest")).table
    assert [None if label != label else label for label in rows.labels.tolist()] == expected
    assert rows.classes == classes
    write_table(photos / "list.parquet", {"path": URIS, "label": [[[1]]] * 3})
    with pytest.raises(SourceError, match=r"its column label, value 0 .* is \[\[1\]\]"):
        listed(source, kind="manifest")


@pytest.mark.parametrize("column", [None, "label"])
def test_lines_of_json_may_leave_out_labels(photos: Path, column: str | None) -> None:
    rows = [{"path": "in/0.jpg"}, {"path": "in/1.jpg", "label": "cat"}, {"path": "in/2.jpg"}]
    source = table(photos, "\n".join(map(json.dumps, rows)), "list.jsonl")
    listing = listed(source, columns=Columns(label=column))
    assert class_of(listing) == {"in/0.jpg": None, "in/1.jpg": "cat", "in/2.jpg": None}


SPELLINGS = {
    "absolute": "{folder}/in/0.jpg",
    "dot": "./in/0.jpg",
    "slashes": "in//0.jpg",
    "up": "in/../in/0.jpg",
    "url": "file://{folder}/in/%30.jpg",
    "linked": "{folder}/link/in/0.jpg",
    "backslash": r"in\0.jpg",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", ["list.csv", "list.jsonl", "list.parquet"])
def test_one_file_is_one_sample_however_it_is_spelled(
    photos: Path, name: str, spelling: str
) -> None:
    (photos / "link").symlink_to(photos)
    again = SPELLINGS[spelling].format(folder=photos)

    def rows(label: str, **more: list[str]) -> str:
        columns = {"path": ["in/0.jpg", "in/1.jpg", again], "label": ["dog", "cat", label]}
        return write_table(photos / name, columns | more)

    listing = listed(rows("dog"), kind="manifest")
    assert list(listing.table.keys) == ["in/0.jpg", "in/1.jpg"]
    assert listing.left_out == {REPEATED: 1}
    with pytest.raises(SourceError, match=r"2 samples in/0\.jpg with the labels cat and dog"):
        listed(rows("cat"), kind="manifest")
    # Keys that the user gives name samples, of which several may be of one file.
    keyed = listed(rows("cat", id=[*"abc"]), kind="manifest", columns=Columns(key="id"))
    assert class_of(keyed) == {"a": "dog", "b": "cat", "c": "cat"}


def test_one_object_is_one_sample_however_it_is_spelled(photos: Path, s3: S3Server) -> None:
    data = (photos / "in/0.jpg").read_bytes()
    with web_server(photos) as base:
        folder = open_folder("s3://bucket", s3.options())
        folder.put("a b.jpg", [data])
        write(photos / "a b.jpg", data)
        for root, again, options in (
            ("s3://bucket", "s3://bucket/a b.jpg", s3.options()),
            (base, f"{base}/a%20b.jpg", None),
        ):
            text = f"path,label\na b.jpg,dog\n{again},cat\n"
            folder.put("list.csv", [text.encode()])
            table(photos, text)
            with pytest.raises(
                SourceError, match=r"2 samples a b\.jpg with the labels cat and dog"
            ):
                listed(f"{root}/list.csv", storage_options=options)


def test_what_a_web_server_does_not_tell_is_said_by_the_next_build(
    photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with web_server(photos) as base:
        for source in (table(photos, f"path\n{base}/in/0.jpg\n{base}/in/1.jpg\n"), f"{base}/in"):
            store = photos / f"{len(source)}.store"
            precache.build(source, store, RECIPE, address="serial")
            assert "not noticed" not in caplog.text
            write(photos / "in/0.jpg", encoded(cut(len(source))))
            precache.build(source, store, RECIPE, address="serial")
            assert re.search(r"samples, such as .*0\.jpg, .*--recompute", caplog.text)
            caplog.clear()
            precache.build(source, store, RECIPE, address="serial", recompute=True)
            assert "not noticed" not in caplog.text
            precache.build(source, fresh := photos / f"{len(source)}", RECIPE, address="serial")
            rebuilt, expected = pixels(store), pixels(fresh)
            assert all(np.array_equal(rebuilt[key], row) for key, row in expected.items())


def test_a_row_that_changed_is_read_again_though_a_web_server_tells_nothing(photos: Path) -> None:
    recipe = {"image": {"ops": [{"op": "decode"}]}, "caption": {"kind": "text"}}
    with web_server(photos) as base:
        for first, caption in ((0, "x"), (1, "x"), (1, "y")):
            lines = [f"{i},{base}/in/{(first + i) % 2}.jpg,{caption}{i}" for i in range(2)]
            source, of_key = table(photos, "\n".join(["id,url,caption", *lines])), {}
            for store in (photos / "store", photos / f"{first}{caption}"):
                fields = precache.Recipe.from_dict({"fields": recipe})
                precache.build(source, store, fields, address="serial", key_column="id")
                rows = precache.CachedDataset(store)
                held = {key: rows[place] for place, key in enumerate(precache.open(store).keys)}
                assert {key: row["caption"] for key, row in held.items()} == {
                    f"{i}": f"{caption}{i}" for i in range(2)
                }
                of_key[store] = [np.asarray(held[f"{i}"]["image"]) for i in range(2)]
            rebuilt, fresh = of_key.values()
            assert all(map(np.array_equal, rebuilt, fresh))


def test_file_uris_are_decoded(photos: Path) -> None:
    path = write(photos / "in/ä 100%.jpg", encoded(cut(7)))
    source = open_source(table(photos, f"path\n{path.as_uri()}\n"))
    assert check_source(source).table.sizes.tolist() == [path.stat().st_size]


def test_a_file_that_is_gone_is_no_hole_unless_it_is_accepted(photos: Path) -> None:
    source = table(photos, "path,label\nin/0.jpg,1\nin/gone.jpg,0\n")
    [one, gone] = open_source(source).fetch(["in/0.jpg", "in/gone.jpg"], [-1, -1])
    assert isinstance(one, Sample)
    assert isinstance(gone, FetchError)
    options: dict[str, Any] = {"address": "serial", "accept_missing": True}
    result = precache.build(source, photos / "store", RECIPE, **options)
    assert [key for key, _ in result.holes] == ["in/gone.jpg"]
    assert labels(photos / "store")["in/0.jpg"] == 1


def test_files_may_lie_in_several_buckets(photos: Path, s3: S3Server) -> None:
    s3.make_bucket("other")
    for number in range(3):
        data = (photos / f"in/{number}.jpg").read_bytes()
        for bucket in ("bucket", "other"):
            open_folder(f"s3://{bucket}", s3.options()).put(f"deep/{number}.jpg", [data])
    uris = [f"s3://{bucket}/deep/{n}.jpg" for n in range(3) for bucket in ("bucket", "other")]
    source = table(photos, "\n".join(["uri", *uris, "in/5.jpg"]))
    one_by_one = check_source(open_source(source, s3.options())).table
    assert list(one_by_one.keys) == [*uris, "in/5.jpg"]
    assert all(one_by_one.etags[:6])


def test_urls_are_requested_as_they_stand_and_their_secrets_are_no_part_of_keys(
    photos: Path,
) -> None:
    write(photos / "in/a b#1.jpg", encoded(cut(7)))
    with web_server(photos) as base:
        host = base.removeprefix("http://")
        uris = [
            f"{base}/in/a%20b%231.jpg",
            f"{base}/in/0.jpg?width=3&sig=secret",
            f"{base}/in/1.jpg#secret",
            f"http://someone:secret@{host}/in/2.jpg",
        ]
        source = open_source(table(photos, "\n".join(["path", *uris])))
        rows = source.list(lambda count: None).table
        samples = source.fetch(rows.keys, rows.sizes.tolist(), rows.locations)
    assert [key.removeprefix(base) for key in rows.keys] == [
        "/in/a%20b%231.jpg", "/in/0.jpg", "/in/1.jpg", "/in/2.jpg"
    ]  # fmt: skip
    contents = [sample.inputs["bytes"] for sample in samples if isinstance(sample, Sample)]
    assert contents == [encoded(cut(number)) for number in (7, 0, 1, 2)]


def test_urls_that_differ_by_their_queries_alone_take_a_column_of_keys(photos: Path) -> None:
    uris = [f"http://127.0.0.1/photo?id={number},{number}" for number in range(2)]
    source = table(photos, "\n".join(["path,id", *uris]))
    with pytest.raises(SourceError, match=r"2 samples http://127.0.0.1/photo; .* by --key-column"):
        listed(source)
    assert list(listed(source, columns=Columns(key="id")).table.keys) == ["0", "1"]


def test_a_file_that_takes_too_long_is_known_by_its_key(photos: Path) -> None:
    answer = threading.Event()
    with web_server(photos, {"/in/0.jpg": answer}) as base:
        source = open_source(table(photos, f"path\n{base}/in/0.jpg\n"))
        rows = source.list(lambda count: None).table
        with pytest.raises(HangError) as raised:
            run_in_time(lambda: source.fetch(rows.keys, [-1], rows.locations), 0.1)
        answer.set()
    assert list(raised.value.late) == list(rows.keys)


def test_of_many_files_the_folder_is_listed(
    photos: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        data = (photos / f"in/{number}.jpg").read_bytes()
        open_folder("s3://bucket", s3.options()).put(f"deep/{number}.jpg", [data])
    source = table(photos, "\n".join(["uri", *(f"s3://bucket/deep/{n}.jpg" for n in range(5))]))
    few = listed(source, storage_options=s3.options()).table
    monkeypatch.setattr(manifests, "FEW_FILES", 2)
    many = listed(source, storage_options=s3.options()).table
    assert many.digest == few.digest
    assert (many.sizes > 0).all()


# --- what is refused ----------------------------------------------------------------------------


def test_links_may_be_followed_out_of_the_folder(photos: Path) -> None:
    source = table(photos / "lists", "path\n../in/0.jpg\n")
    [sample] = open_source(source, follow_links=True).fetch(["../in/0.jpg"], [-1])
    assert isinstance(sample, Sample)
    (photos / "lists/photos").symlink_to(photos / "in")
    source = table(photos / "lists", "path\nphotos/0.jpg\n")
    with pytest.raises(SourceError, match=r"photos/0\.jpg lies behind a link .*--follow-links"):
        listed(source)
    assert len(listed(source, follow_links=True).table) == 1


def test_a_table_at_a_url_names_no_local_file(photos: Path, s3: S3Server) -> None:
    folder = open_folder("s3://bucket", s3.options())
    for uri in ("/etc/passwd", "file:///etc/passwd"):
        folder.put("list.csv", [f"path\n{uri}\n".encode()])
        with pytest.raises(SourceError, match="is a file of a local disk, and a table at a URL"):
            listed("s3://bucket/list.csv", storage_options=s3.options())


REFUSED: list[tuple[str, str | bytes, Columns, str]] = [
    *(
        (name, text, Columns(), why)
        for name, text, why in [
            ("a.csv", "path,label\nin/0.jpg\n", "line 2 of .* has 1 cells, and the first line 2"),
            ("a.csv", "path,label\nin/0.jpg,a,b\n", "line 2 of .* has 3 cells, and the first"),
            ("a.csv", "path,label\nin/0.jpg,0.5\nin/1.jpg,1e99\n",
             r"in/1.jpg is 1e\+99, which is no finite"),
            ("a.csv", "path\n", "names no file"),
            ("a.csv", "", "names no file"),
            ("a.csv", 'path\n"in/0.jpg\n', "line 2 of .* is not CSV: .*; correct its quotes"),
            ("a.csv", "path|label\nin/0.jpg|a\n",
             r"first line names 'path\|label'\. Choose one by --image-column"),
            ("a.csv", "in/0.jpg,dog\nin/1.jpg,cat\n", r"of URIs; its first line names 'in/0\.jpg'"),
            ("a.csv", "path,label,label\nin/0.jpg,a,b\n", "has several columns 'label'; rename"),
            ("a.csv", b"path\n\xff\xfe\n", r"1 whose names are not UTF-8.*save a table as UTF-8"),
            ("a.parquet", b"\x9a\x07" * 499, "cannot be read"),
            ("a.jsonl", "[1]", "line 1 of .* is no JSON object"),
            ("a.jsonl", "{", "line 1 of .* is not JSON"),
            ("a.jsonl", '{"path": "in/0.jpg", "label": "a", "label": "b"}', "has 'label' 2 times"),
            ("a.jsonl", '{"path": "in/0.jpg", "label": [{"a": 1}]}', "a list has class names, cla"),
            ("a.jsonl", '{"path": "in/0.jpg", "label": Infinity}', "in/0.jpg is inf, which is no"),
            ("a.jsonl", '{"path": 7}', "line 1 .* has no path"),
            ("a.jsonl", '{"path": ""}', "line 1 .* has no path"),
            ("a.jsonl", '{"path": "in/0.jpg"}\n{"label": "cat"}', "line 2 .* has no path, wh"),
            ("a.jsonl", '{"path": "../secret.jpg"}', "line 1 of .*leads out of the folder of its"),
            ("a.jsonl", '{"path": "in/../../secret.jpg"}', "line 1 of .*leads out of the folder"),
            ("a.jsonl", "x" * (LONGEST_LINE + 1), "a line of more than 1,048,576 characters"),
        ]
    ),
    ("a.csv", "path,where\nx,in/0.jpg\n", Columns("were"), r"'were' \(did you mean where\?\)"),
    ("a.jsonl", '{"path": "in/0.jpg", "label": 1}', Columns(label="lable"),
     r"has no column 'lable' \(did you mean label\?\)"),
]  # fmt: skip
"""Name and bytes of a table, the columns that are asked for, and why it is refused."""


@pytest.mark.parametrize(("name", "text", "columns", "why"), REFUSED)
def test_tables_that_do_not_fit_are_refused(
    photos: Path,
    name: str,
    text: str | bytes,
    columns: Columns,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("precache_workers.sources.tables.LISTED_ROWS", 1)
    write(photos / name, text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SourceError, match=why):
        listed(photos / name, kind="manifest", columns=columns)
