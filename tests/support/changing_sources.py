"""Sources of every kind that change between builds, of photos that are known by numbers."""

import dataclasses
import functools
import io
import json
import os
import random
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from precache.errors import FetchError
from precache_workers.sources.folder import FolderSource
from tests.support.building import LONG_AGO, encoded
from tests.support.containers import add

BROKEN = -1
"""The number of a photo that cannot be decoded."""
NBYTES = 2600
"""Size of each photo, padded, so that size and time tell none from another."""
CLASSES = ("cat", "dog", "eel", "fox")
TIMES = [LONG_AGO + 10 * number for number in range(3)]
"""Times that files get: few, so that they come back."""


# --- photos -------------------------------------------------------------------------------------


def size_of(number: int) -> tuple[int, int]:
    """(height, width): every third photo is a larger one."""
    return (26, 24) if number % 3 == 0 else (20, 18)


@functools.cache
def pixels_of(number: int) -> np.ndarray:
    random = np.random.default_rng(number)
    return random.integers(0, 256, (*size_of(number), 3), np.uint8)


@functools.cache
def bytes_of(number: int) -> bytes:
    data = b"no photo" if number == BROKEN else encoded(Image.fromarray(pixels_of(number)), "PNG")
    assert len(data) <= NBYTES, len(data)
    return data.ljust(NBYTES, b"\0")


@dataclasses.dataclass(frozen=True)
class Sample:
    """The number of its photo, and its label, if any."""

    number: int
    label: str | int | None


# --- sources ------------------------------------------------------------------------------------


class Source:
    """Samples by name, written where a build reads them; `argument` names them all."""

    extra = False
    """Whether samples have a second item, an array."""
    named = True
    """Whether labels are names of classes that a build is told to override."""

    def __init__(self, root: Path, draw: random.Random) -> None:
        self.root, self.draw = root, draw
        self.samples: dict[str, Sample] = {}
        self.argument = str(root)
        root.mkdir(parents=True)

    def name_of(self, serial: int, label: str) -> str:
        return f"{label}/{serial:03d}.png"

    def key_of(self, name: str) -> str:
        return name

    def label_of(self, name: str, label: str) -> str | int | None:
        """Return the label that a sample of this name gets when it is given this one."""
        return label

    def put(self, name: str, number: int, label: str) -> None:
        """Give a name a photo, at any time."""
        self.samples[name] = Sample(number, self.label_of(name, label))
        self.write(name, self.draw.choice(TIMES))

    def rewrite(self, name: str, number: int) -> None:
        """Give a name another photo of the same size and time."""
        self.samples[name] = dataclasses.replace(self.samples[name], number=number)
        self.write(name, None)

    def remove(self, name: str) -> None:
        del self.samples[name]

    def touch(self, name: str) -> None:
        self.write(name, self.draw.choice(TIMES))

    def write(self, name: str, time: int | None) -> None:
        """Write a sample with a time, or None for the one that it had."""

    def finish(self) -> None:
        """Write what holds all samples."""

    def expected(self) -> dict[str, Sample]:
        """Key -> sample."""
        return {self.key_of(name): sample for name, sample in self.samples.items()}


class Folder(Source):
    """A folder of class folders."""

    def label_of(self, name: str, label: str) -> str | int | None:
        return name.partition("/")[0]

    def write(self, name: str, time: int | None) -> None:
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        moment = path.stat().st_mtime if time is None else time
        if not path.exists() or path.read_bytes() != bytes_of(self.samples[name].number):
            path.write_bytes(bytes_of(self.samples[name].number))
        os.utime(path, (moment, moment))

    def remove(self, name: str) -> None:
        super().remove(name)
        path = self.root / name
        path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()


class Table(Folder):
    """A table of URIs, with labels, beside the photos."""

    def __init__(self, root: Path, draw: random.Random) -> None:
        super().__init__(root, draw)
        self.argument = str(root / "table.csv")

    def label_of(self, name: str, label: str) -> str | int | None:
        return label

    def finish(self) -> None:
        lines = [f"{name},{sample.label}" for name, sample in self.samples.items()]
        (self.root / "table.csv").write_text("\n".join(["path,label", *lines]) + "\n")


class Archives(Source):
    """Two tar archives, with labels by folder or by members of their own."""

    def __init__(self, root: Path, draw: random.Random) -> None:
        super().__init__(root, draw)
        self.argument = f"{root}/part-{{0..1}}.tar"
        self.by_member = draw.random() < 0.5
        self.times: dict[str, int] = {}
        self.distinct = draw.random() < 0.5
        self.clock = LONG_AGO

    def name_of(self, serial: int, label: str) -> str:
        return f"{serial:03d}.png" if self.by_member else super().name_of(serial, label)

    def key_of(self, name: str) -> str:
        return f"part-{self._part(name)}.tar/{name}"

    def _part(self, name: str) -> int:
        return int(re.sub(r"\D", "", name)) % 2

    def label_of(self, name: str, label: str) -> str | int | None:
        return label if self.by_member else name.partition("/")[0]

    def write(self, name: str, time: int | None) -> None:
        self.clock += 1
        self.times[name] = self.clock if self.distinct else LONG_AGO

    def finish(self) -> None:
        for part in range(2):
            path = self.root / f"part-{part}.tar"
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as tar:
                for name in sorted(self.samples):
                    if self._part(name) == part:
                        sample = self.samples[name]
                        add(tar, name, bytes_of(sample.number), self.times[name])
                        if self.by_member:
                            label = str(sample.label).encode()
                            add(tar, name.replace(".png", ".cls"), label, LONG_AGO)
            if not path.exists() or path.read_bytes() != buffer.getvalue():
                path.write_bytes(buffer.getvalue())
                moment = self.draw.choice(TIMES)
                os.utime(path, (moment, moment))


class Dataset(Source):
    """A torch dataset, which names its photos below a folder where none ever changes."""

    named = False
    code = """
        from pathlib import Path
        PHOTOS = Path({photos!r})
        DATA = {data!r}

        class Photos:
            def __len__(self):
                return len(DATA)

            def __getitem__(self, index):
                name, number, label = DATA[index]
                return (PHOTOS / str(number)).read_bytes(), label
    """

    def __init__(self, root: Path, draw: random.Random) -> None:
        super().__init__(root, draw)
        self.module = f"history_{root.name}"
        self.argument = f"python:{self.module}:Photos"

    def name_of(self, serial: int, label: str) -> str:
        return f"sample {serial:03d}"

    def label_of(self, name: str, label: str) -> str | int | None:
        return CLASSES.index(label)

    def data(self) -> list[tuple[str, int, Any]]:
        return [(name, each.number, each.label) for name, each in self.samples.items()]

    def labels(self) -> dict[str, Any]:
        """What else the code has of labels."""
        return {}

    def write(self, name: str, time: int | None) -> None:
        number = self.samples[name].number
        path = self.root / str(number)
        if not path.exists():
            path.write_bytes(bytes_of(number))

    def finish(self) -> None:
        named = {"photos": str(self.root), "table": self._table(), **self.labels()}
        lines = self.code.format(data=self.data(), **named)
        module = re.sub("(?m)^ {8}", "", lines)
        (self.root.parent / "code" / f"{self.module}.py").write_text(module)

    def _table(self) -> str:
        return str(self.root / "table.json")

    def expected(self) -> dict[str, Sample]:
        return {str(index): sample for index, sample in enumerate(self.samples.values())}


class TargetDataset(Dataset):
    """Labels are the attribute `targets`, as text, or as numbers with names in `classes`."""

    named = True
    code = """
        from pathlib import Path
        PHOTOS = Path({photos!r})

        class Photos:
            data = {data!r}
            targets = {targets!r}
            {classes}

            def __len__(self):
                return len(self.data)

            def __getitem__(self, index):
                return (PHOTOS / str(self.data[index][1])).read_bytes()
    """

    def __init__(self, root: Path, draw: random.Random) -> None:
        super().__init__(root, draw)
        self.as_text = draw.random() < 0.5 and "PRECACHE_OTHER_TREE" not in os.environ

    def label_of(self, name: str, label: str) -> str | int | None:
        return label

    def labels(self) -> dict[str, Any]:
        names = [str(sample.label) for sample in self.samples.values()]
        if self.as_text:
            return {"targets": names, "classes": ""}
        classes = sorted(set(names))
        return {
            "targets": [classes.index(name) for name in names],
            "classes": f"classes = {classes}",
        }


class NamedDataset(Dataset):
    """Samples have keys, fingerprints and two items; a table holds them, and the code stays."""

    extra = True
    code = """
        import json
        from pathlib import Path
        import numpy as np
        PHOTOS = Path({photos!r})

        class Photos:
            def __init__(self):
                self._data = json.loads(Path({table!r}).read_text())

            def __len__(self):
                return len(self._data)

            def key(self, index):
                return self._data[index][0]

            def fingerprint(self, index):
                return str(self._data[index][1:])

            def __getitem__(self, index):
                name, number, label = self._data[index]
                image = (PHOTOS / str(number)).read_bytes()
                return {{"image": image, "extra": np.full(5, number, np.float32), "label": label}}
    """

    def finish(self) -> None:
        super().finish()
        Path(self._table()).write_text(json.dumps(self.data()))

    def expected(self) -> dict[str, Sample]:
        return dict(self.samples)


class FileDataset(Dataset):
    """The attribute `samples` names the file of each sample, which is written anew."""

    code = """
        class Photos:
            def __init__(self):
                self.samples = [(path, label) for path, _, label in {data!r}]

            def __len__(self):
                return len(self.samples)

            def __getitem__(self, index):
                path, label = self.samples[index]
                with open(path, "rb") as file:
                    return file.read(), label
    """

    def data(self) -> list[tuple[str, int, Any]]:
        # A number that stays: only the files tell of a change.
        return [(str(self.root / name), 0, each.label) for name, each in self.samples.items()]

    def name_of(self, serial: int, label: str) -> str:
        return f"{serial:03d}.png"

    write = Folder.write

    def remove(self, name: str) -> None:
        super().remove(name)
        (self.root / name).unlink()


def make_unfetchable(patch: pytest.MonkeyPatch, name: str) -> None:
    """Samples of folders whose keys have this name in them are out of reach."""
    fetch = FolderSource.fetch

    def fetched(self: FolderSource, keys: Any, *how: Any) -> Any:
        samples = zip(keys, fetch(self, keys, *how), strict=True)
        return [FetchError("no answer") if name in key else sample for key, sample in samples]

    patch.setattr(FolderSource, "fetch", fetched)


SOURCES = (Folder, Folder, Archives, Table, Dataset, TargetDataset, NamedDataset, FileDataset)
