"""Common layouts of data: most build without a flag, the others by what the refusal names."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import precache
from tests.support.building import write
from tests.support.containers import quiet_datasets
from tests.support.layouts import ANIMALS, Builds, Labels, lay, photo, put, put_classes, put_csv

IN_CLASSES = "{cat/a1,dog/a2,cat/b1,eel/b2}"
FLAT = "{a1,a2,b1,b2}"


def csv_of(header: str, row: str = "{}.png,{}") -> str:
    """A table of `ANIMALS`."""
    return "\n".join([header, *(row.format(*pair) for pair in ANIMALS.items())])


NONE = dict.fromkeys("ab")
TREES: dict[str, tuple[str, str, Labels]] = {
    "class folders": (f"photos/{IN_CLASSES}", "photos", ANIMALS),
    "folders of Jupyter and of a NAS": (
        f"photos/{IN_CLASSES} photos/{{.ipynb_checkpoints/a1,cat/@eaDir/b1,#recycle/x}}",
        "photos",
        ANIMALS,
    ),
    "one split": (f"photos/{{train,val}}/{IN_CLASSES}", "photos/train", ANIMALS),
    "validation split": (f"photos/{{train,val}}/{IN_CLASSES}", "photos/val", ANIMALS),
    "a flat folder": ("photos/{a,b}", "photos", NONE),
    "nested classes": (
        "photos/{animal/cat/a,animal/dog/b,plant/oak/c}",
        "photos",
        {"a": "animal", "b": "animal", "c": "plant"},
    ),
    "VOC": ("V/{JPEGImages/{a,b},SegmentationClass/a}", "V/JPEGImages", NONE),
    "COCO": ("coco/{train2017/{a,b},val2017/c}", "coco/train2017", NONE),
    "birds": (
        "CUB/images/{001.Albatross/a.png,002.Auklet/b.png}",
        "CUB",
        {"a": "001.Albatross", "b": "002.Auklet"},
    ),
    "digits": ("mnist/{0/d0,1/d1,9/d9}", "mnist", {"d0": "0", "d1": "1", "d9": "9"}),
}
"""Folders -> photos, the source, and its labels."""

TABLES: dict[str, tuple[str, str, str, Labels]] = {
    "a spreadsheet": (
        "{a,b,c}",
        "\ufeffpath,label,note\na.png,0,\nb.png,,x\nc.png,12,\n,,\n,,\n",
        "table.csv",
        {"a": 0, "b": None, "c": 12},
    ),
    "semicolons": (FLAT, csv_of("path;label", "{}.png;{}"), "table.csv", ANIMALS),
    "labels beside": (
        f"photos/{FLAT}", csv_of("filename,label"), "photos --labels table.csv", ANIMALS
    ),
    "Kaggle": (
        f"kaggle/{{train/{FLAT},test/t}}",
        csv_of("id,label", "{},{}"),
        "kaggle/train --labels table.csv",
        ANIMALS,
    ),
    "a regression": (
        "{a,b,c}",
        "path,target\na.png,0.5\nb.png,\nc.png,-2",
        "table.csv",
        {"a": 0.5, "b": None, "c": -2.0},
    ),
    "lines of JSON": (
        FLAT,
        csv_of("", '{{"file_name": "{}.png", "label": "{}", "text": "t"}}'),
        "table.jsonl",
        ANIMALS,
    ),
}  # fmt: skip
"""Layouts with a table -> photos, the table, the source, and its labels."""
