"""A sample keeps its identity as long as its content stays, and gets another one with another."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precache.storage.open import open_folder
from precache.store.columns import Texts
from precache.store.row_table import RowTable
from precache_workers.planning import source_record
from precache_workers.planning.source_record import RecalledListing, recall

OPS = ("rewrite", "touch", "chmod", "change", "old time", "remove", "add", "lose record", "nothing")
SIZES = (100, 200)


@dataclass(frozen=True)
class File:
    size: int
    mtime: int
    ctime: int
    content: str


@dataclass
class Reader:
    """Reads the files of a source, and counts them."""

    files: dict[str, File]
    brings_labels: bool = False
    read: int = 0

    def say(self, text: str) -> None: ...

    def __call__(self, table: RowTable, rows: Sequence[int]) -> list[str]:
        keys = [table.keys[row] for row in rows]
        self.read += len(keys)
        return [self.files[key].content for key in keys]


class Source:
    """Files that are edited, and the versions that were built of them."""

    def __init__(self, seed: int, has_file_states: bool) -> None:
        self.draw, self.clock, self.has_file_states = random.Random(seed), 1000, has_file_states
        self.store = open_folder(f"memory://record/{seed}-{has_file_states}-{random.random()}")
        self.files: dict[str, File] = {}
        self.versions: list[tuple[RowTable, dict[str, str]]] = []
        for key in "abcde":
            self.files[key] = self.new()

    def new(self) -> File:
        self.clock += 1
        size = self.draw.choice(SIZES)
        return File(size, self.clock, self.clock, self.text(size))

    def text(self, size: int) -> str:
        """Return a content of some size that no file had before."""
        return f"content {self.clock} of {size}"

    def edit(self, op: str) -> None:
        self.clock += 1
        key = self.draw.choice(sorted(self.files))
        file = self.files[key]
        if op == "rewrite" and self.has_file_states:  # else nothing tells
            self.files[key] = replace(file, ctime=self.clock, content=self.text(file.size))
        elif op in ("touch", "chmod"):
            mtime = self.clock if op == "touch" else file.mtime
            self.files[key] = replace(file, mtime=mtime, ctime=self.clock)
        elif op == "change":
            self.files[key] = self.new()
        elif op == "old time" and self.has_file_states:
            known = [before[key] for before in self.listed() if key in before]
            size, mtime = self.draw.choice(known) if known else (file.size, file.mtime)
            old = [texts[key] for _, texts in self.versions if key in texts]
            old = [content for content in old if content.endswith(f" of {size}")]
            content = self.draw.choice([self.text(size), *old])
            self.files[key] = File(size, mtime, self.clock, content)
        elif op == "remove" and len(self.files) > 2:
            self.gone = key, self.files.pop(key)
        elif op == "add":
            key, file = getattr(self, "gone", (f"n{self.clock}", self.new()))
            self.files.setdefault(key, replace(file, ctime=self.clock))
        elif op == "lose record":
            for name in self.store.names("_listings"):
                self.store.remove(f"_listings/{name}")

    def listed(self) -> list[dict[str, tuple[int, int]]]:
        return [
            {k: (int(s), int(m)) for k, s, m in zip(t.keys, t.sizes, t.mtimes, strict=True)}
            for t, _ in self.versions
        ]

    def list(self) -> tuple[RecalledListing, int]:
        """List the files; returns also how many were read."""
        keys = sorted(self.files)
        files = [self.files[key] for key in keys]
        table = RowTable.of_keys(
            keys,
            sizes=np.array([file.size for file in files]),
            mtimes=np.array([file.mtime for file in files]),
            source="here",
        )
        file_states = np.array([file.ctime for file in files]) if self.has_file_states else None
        reader = Reader(self.files)
        recalled = recall(self.store, table, file_states, reader, most_bytes=1000)
        return recalled, reader.read

    def build(self, recalled: RecalledListing) -> None:
        contents = {key: file.content for key, file in self.files.items()}
        self.versions.append((recalled.table, contents))
        if (record := recalled.new_record()) is not None:
            self.store.put(record[0], [record[1]])

    def stored(self, store: Any, source: str, brings: bool, deep: bool) -> Any:
        """Tables of the versions, the latest first."""
        for table, contents in self.versions[::-1][: None if deep else 1]:
            texts = Texts([contents[key] for key in table.keys])
            yield source_record.as_record(table), texts


def identities(table: RowTable) -> dict[str, tuple[int, int, str]]:
    columns = table.sizes.tolist(), table.mtimes.tolist(), table.etags
    return dict(zip(table.keys, zip(*columns, strict=True), strict=True))


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.booleans(), st.lists(st.sampled_from(OPS), max_size=25))
def test_identity_follows_content_through_any_history(
    seed: int, has_file_states: bool, ops: list[str]
) -> None:
    source = Source(seed, has_file_states)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_record, "stored_tables", source.stored)
        for op in ["nothing", *ops]:
            source.edit(op)
            recalled, _ = source.list()
            now = identities(recalled.table)
            for table, contents in source.versions:
                for key, identity in identities(table).items():
                    if now.get(key) == identity:
                        assert source.files[key].content == contents[key], (op, key)
            if source.versions:
                table, contents = source.versions[-1]
                for key, identity in identities(table).items():
                    if key in now and source.files[key].content == contents[key]:
                        assert now[key] == identity, (op, key)
            if source.draw.random() < 0.7:
                source.build(recalled)
                again, read = source.list()
                assert identities(again.table) == now
                assert read == 0
                assert again.new_record() is None
