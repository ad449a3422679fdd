"""The frame of all benchmarks: one command line, rounds in turns, stores and photos, results.

A module of benchmarks has parts, functions marked by `part`. The parameters of a part are its
options, and it returns a `Table`, or yields several. `main` runs one of them.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_origin

import numpy as np
from rich.console import Console
from rich.table import Column
from rich.table import Table as RichTable

import precache
from precache.reading.array_reader import ArrayReader
from precache.runtime.usage import cores
from precache.storage.local_files import map_file
from precache.store.layout import INDEX_CHECKSUM_NBYTES, INDEX_ENTRY_NBYTES, decode_index
from tests.bench.costs import Cost, busy_seconds, cost_of, cpu_seconds, files_of, touch

DEFAULT_PHOTOS = Path(__file__).resolve().parents[2] / "../shared/photos"
PHOTO_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp"))
CROP, RESIZE = 224, 256
BATCH = 256
ROW_NBYTES = 3 * CROP * CROP
WIDTH = 170

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Epoch = Callable[[], int]
"""Goes through samples, and returns how many there were."""

log = Console(stderr=True, highlight=False)

Rounds = Annotated[int, "rounds, each of all competitors in turn, after those that warm up"]
Rows = Annotated[int, "rows of each store; photos, samples or keys where there is none"]


class MissingError(Exception):
    """The machine lacks what a part needs; the message says what, in one line."""


# --- results ------------------------------------------------------------------------------------


@dataclass
class Table:
    """Figures of a part, printed for people or as JSON.

    Attributes
    ----------
    columns
        Each a name, and after ``|`` the format of its numbers.
    remarks
        Lines below the table.
    measured
        All costs and whatever else was measured, for programs.
    """

    title: str
    columns: Sequence[str]
    caption: str = ""
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)

    def add(self, *cells: Any) -> None:
        self.rows.append(cells)

    def rich(self) -> RichTable:
        """For people: leading texts that repeat are left out."""
        names, formats = zip(*(name.partition("|")[::2] for name in self.columns), strict=True)
        texts = sum(1 for _ in itertools.takewhile(lambda format: not format, formats))
        columns = [
            Column(name, justify="right" if number else "left", no_wrap=not number)
            for name, number in zip(names, formats, strict=True)
        ]
        made, before = RichTable(*columns, title=self.title, caption=self.caption), ()
        for cells in self.rows:
            shown = list(map(_shown, cells, formats))
            if texts > 1 and before and before[0] != cells[0]:
                made.add_section()
            for place in range(texts - 1):
                if before[: place + 1] == cells[: place + 1]:
                    shown[place] = ""
            made.add_row(*shown)
            before = cells
        return made

    def plain(self) -> dict[str, Any]:
        """For programs."""
        names = [name.partition("|")[0].replace("\n", " ") for name in self.columns]
        return {
            "title": self.title,
            "rows": [dict(zip(names, cells, strict=False)) for cells in self.rows],
            "remarks": self.remarks,
            "measured": self.measured,
        }


def _shown(value: Any, spec: str) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, str) else f"{value:{spec}}"


# --- the command line ---------------------------------------------------------------------------

_HELP: Any = functools.partial(
    argparse.RawDescriptionHelpFormatter, max_help_position=26, width=100
)


@dataclass(frozen=True)
class Part:
    """A benchmark of a module.

    Attributes
    ----------
    needs
        Modules without which it cannot be measured.
    """

    name: str
    run: Callable[..., Table | Iterable[Table]]
    needs: tuple[str, ...]

    @property
    def help(self) -> str:
        """The first line of its docstring."""
        return inspect.getdoc(self.run).splitlines()[0]

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Options for the parameters of the function, but for the first."""
        for name, parameter in list(inspect.signature(self.run).parameters.items())[1:]:
            kind, text = get_args(parameter.annotation)
            flag, default = f"--{name.replace('_', '-')}", parameter.default
            many = get_origin(kind) is tuple
            kind = get_args(kind)[0] if many or isinstance(kind, UnionType) else kind
            choices = get_args(kind) or None  # of a Literal
            shown = " ".join(map(str, default)) if many else default
            if default is inspect.Parameter.empty:
                parser.add_argument(name, type=kind, help=text)
            elif kind is bool:
                parser.add_argument(flag, action="store_true", help=text)
            else:
                text += (
                    f" ({shown:,})" if isinstance(shown, int) else f" ({shown})" if shown else ""
                )
                parser.add_argument(
                    flag, type=str if choices else kind, choices=choices, default=default,
                    nargs="+" if many else None, help=text.replace("%", "%%"),
                )  # fmt: skip


def part(
    name: str, *, needs: Sequence[str] = ()
) -> Callable[[Callable[..., Table | Iterable[Table]]], Part]:
    """Mark a function as a part: its docstring is the help, its parameters are the options.

    It is given a `Work` first. Each other parameter is annotated with a type and a help text.
    """
    return lambda function: Part(name, function, tuple(needs))


def parse(
    module: str, parts: Sequence[Part], arguments: Sequence[str]
) -> tuple[Part, dict[str, Any]]:
    """The part that a command line names, by default the first one, and its options."""
    given, program = list(arguments), f"python -m tests.bench.{module}"
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, parts[0].name)
    width = max(len(one.name) for one in parts)
    parser = argparse.ArgumentParser(
        usage=f"{program} [PART] [options]",
        description=sys.modules[parts[0].run.__module__].__doc__,
        epilog=f"parts ({parts[0].name} runs without one; PART --help lists the options):\n"
        + "\n".join(f"  {one.name:{width}}  {one.help}" for one in parts),
        formatter_class=_HELP,
    )
    choices = parser.add_subparsers(dest="part", metavar="PART", help=argparse.SUPPRESS)
    for one in parts:
        text, name = inspect.getdoc(one.run), one.name
        options = choices.add_parser(
            name, prog=f"{program} {name}", description=text, formatter_class=_HELP
        )
        one.add_options(options)
        options.add_argument("--photos", type=Path, help="folder of photographs")
        options.add_argument("--folder", type=Path, help="work there, and keep what is made")
        options.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = vars(parser.parse_args(given))
    for name in ("rounds", "rows"):
        if chosen.get(name) is not None and chosen[name] < 1:
            parser.error(f"--{name} {chosen[name]}: give at least 1")
    return {each.name: each for each in parts}[chosen.pop("part")], chosen


def main(module: str, parts: Sequence[Part]) -> None:
    """Run the part that the command line names."""
    one, options = parse(module, parts, sys.argv[1:])
    try:
        _run(f"{module} {one.name}", one, options)
    except (MissingError, precache.UsageError) as error:
        raise SystemExit(f"nothing measured: {error}") from None


def _run(title: str, one: Part, options: dict[str, Any]) -> None:
    for name in one.needs:
        if importlib.util.find_spec(name) is None:
            raise MissingError(f"this needs {name}, and it is not installed")
    photos, folder, as_json = (options.pop(name) for name in ("photos", "folder", "json"))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    tables, machine = [], _machine()
    with work_folder(folder) as made:
        busy, cpu, began = busy_seconds(), cpu_seconds(), time.perf_counter()
        returned = one.run(Work(made, photos), **options)
        for table in [returned] if isinstance(returned, Table) else returned:
            tables.append(table)
            if not as_json:
                console.print(table.rich())
                for remark in table.remarks:
                    console.print(remark, soft_wrap=True, markup=False)
        by_others = max(0.0, busy_seconds() - busy - (cpu_seconds() - cpu))
        others = by_others / (time.perf_counter() - began) / cores()
    if as_json:
        found = {
            "part": title, "options": options, "machine": machine, "others": others,
            "tables": [table.plain() for table in tables],
        }  # fmt: skip
        print(json.dumps(found, default=_plain))
    else:
        console.print(f"{machine}; other processes had {others:.0%} of the cores", soft_wrap=True)


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "zarr"))
    python = f"Python {platform.python_version()} on {platform.platform()}"
    return f"precache {precache.__version__}, {libraries}, {python}, {cpu}, {cores()} cores"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.item() if isinstance(value, np.generic) else str(value)


# --- measuring ----------------------------------------------------------------------------------


def in_clean_process(
    work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call `work` where no earlier measurement left threads, warm pools or freed memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args, **kwargs).result()


@contextlib.contextmanager
def serving(serve: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """The pipe to a process that runs ``serve(pipe, *args)``, whose CPU time is not ours."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=[theirs, *args], daemon=True)
    process.start()
    try:
        yield pipe
    finally:
        process.kill()
        process.join()


def median_ratio(costs: Sequence[float], floors: Sequence[float]) -> float:
    """Median of the ratios of neighbours in time: what the whole machine was doing cancels out."""
    return statistics.median(a / b for a, b in zip(costs, floors, strict=True))


@dataclass(frozen=True)
class Turns:
    """Costs by competitor, one a round."""

    costs: Mapping[str, list[Cost]]

    def each(self, name: str, figure: str = "cpu_ms_per_1000") -> list[float]:
        return [getattr(cost, figure) for cost in self.costs[name]]

    def median(self, name: str, figure: str = "cpu_ms_per_1000") -> float:
        return statistics.median(self.each(name, figure))

    def ratio(self, name: str, to: str, figure: str = "cpu_ms_per_1000") -> float:
        return median_ratio(self.each(name, figure), self.each(to, figure))

    def figures(self, name: str, floor: str) -> tuple[float, float, float]:
        """CPU-ms per 1,000, its ratio to the floor's, and samples/s."""
        return self.median(name), self.ratio(name, floor), self.median(name, "samples_per_s")


def in_turns(
    ways: Mapping[str, Epoch],
    rounds: int,
    before: Callable[[str], object],
    *,
    children: bool = False,
) -> Turns:
    """Measure competitors in turns, after a round that warms up, each after a call of `before`."""
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            before(name)
            costs[name] += [cost_of(way, children=children)] * (number > 0)
    return Turns(costs)


def rotated(ways: Sequence[Result], rounds: int) -> Iterator[Result]:
    """All ways in every round, each round beginning with another."""
    for number in range(rounds):
        log.print(f"round {number + 1} of {rounds}")
        first = number % len(ways)
        yield from (*ways[first:], *ways[:first])


def beside(
    ways: Mapping[str, tuple[Callable[[], Result], Callable[[], float]]], rounds: int
) -> Iterator[tuple[str, Result, float]]:
    """Run ways in turns; of each yields its name, its result, and the mean of its floor, which runs
    before and after it."""
    last: dict[Hashable, float] = {}
    for number, (name, (way, floor)) in itertools.product(range(rounds), ways.items()):
        log.print(f"round {number + 1} of {rounds}: {name}")
        before = last[floor] if floor in last else floor()
        result = way()
        last[floor] = floor()
        yield name, result, (before + last[floor]) / 2


def drain(loader: Iterable[Mapping[str, Any]]) -> int:
    """Go through an epoch, do nothing with its batches, and return its samples."""
    rows = 0
    for batch in loader:
        rows += len(batch["row"])
        del batch
    return rows


# --- stores -------------------------------------------------------------------------------------


def mapped(path: Path) -> np.ndarray:
    """The bytes of a file (uint8)."""
    with path.open("rb") as file:
        return map_file(file.fileno())


def frames_of(store: Path, field: str = "image") -> list[tuple[Path, int, int]]:
    """File, offset and length of each stored chunk of a field, in the order of the rows."""
    version = precache.open(store)
    reader = ArrayReader(version, field)
    chunks = reader.array.object_chunks
    found: list[tuple[Path, int, int]] = []
    for number in range(reader.array.objects):
        path = Path(version.path) / field / reader.array.object_name(number)
        data = mapped(path)
        index = data[-(INDEX_ENTRY_NBYTES * chunks + INDEX_CHECKSUM_NBYTES) :].data
        index = decode_index(index, chunks)
        found += [(path, *extent) for extent in index[index[:, 1] < len(data)].tolist()]
    return found


def mapped_frames(store: Path) -> list[memoryview]:
    """The stored chunks, as they lie in the mapped shards."""
    data = functools.cache(lambda path: mapped(path).data)
    return [data(path)[start : start + length] for path, start, length in frames_of(store)]


def flat_copy(store: Path, path: Path) -> Path:
    """Write the rows of a store, one after another, into a plain file."""
    with precache.Loader(store, BATCH, shuffle=False, device="cpu") as loader, path.open("wb") as f:
        for batch in loader:
            f.write(batch["image"].numpy())
    return path


def take_epoch(flat: Path, row_nbytes: int, order: Sequence[np.ndarray]) -> Epoch:
    """The floor of uncompressed rows: `np.take` from a memory map into a reused buffer."""
    source = np.memmap(flat, np.uint8, "r").reshape(-1, row_nbytes)
    buffer = np.empty((BATCH, row_nbytes), np.uint8)

    def run() -> int:
        for rows in order:
            np.take(source, rows, axis=0, out=buffer[: len(rows)], mode="clip")
        return sum(map(len, order))

    return run


def batches_of(rows: int) -> list[np.ndarray]:
    """Row numbers of shuffled batches."""
    order = np.random.default_rng(0).permutation(rows)
    return [order[start : start + BATCH] for start in range(0, rows, BATCH)]


# --- photos and folders -------------------------------------------------------------------------


@contextlib.contextmanager
def work_folder(named: Path | None) -> Iterator[Path]:
    """The folder that was named, which stays, or a temporary one."""
    if named is not None:
        named.mkdir(parents=True, exist_ok=True)
        yield named.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="precache-bench-") as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Work:
    """Where a part works, and its photographs."""

    folder: Path
    named: Path | None = None

    def files(self) -> tuple[Path, list[Path]]:
        """A folder of photographs, made if there is none, and the files that can be decoded."""
        from tests.demo.photos import make_photos

        root = self.named or (DEFAULT_PHOTOS if DEFAULT_PHOTOS.is_dir() else None)
        broken: set[Path] = set()
        if root is None:
            log.print("Making photos")
            made = make_photos(self.folder / "made")
            root, broken = made.folder, {made.folder / key for key in made.broken}
        files = (path for path in root.rglob("*") if path.suffix.lower() in PHOTO_SUFFIXES)
        usable = sorted(set(files) - broken)
        if not usable:
            raise SystemExit(f"{root} holds no photo that would do; name another with --photos")
        return root, usable

    def photos(self, count: int, *, plain: bool = False) -> Path:
        """A folder of so many, links to those there are, each under as many names as it takes.

        Parameters
        ----------
        plain
            Take only those that libjpeg-turbo alone makes RGB of, as of nearly all.
        """
        folder = self.folder / f"{'plain' if plain else 'photos'}-{count}"
        if not folder.exists():
            root, files = self.files()
            files = [path for path in files if not plain or decodes(path)]
            multiply(files, root, count, folder)
        return folder

    def crops(self, codec: str, rows: int) -> Path:
        """A store of so many rows, each another random crop of a photo, in the page cache."""
        source, store = self.photos(rows), self.folder / f"{codec}-{rows}.store"
        log.print(f"{codec}: building {rows:,} rows")
        crop = {"op": "random_resized_crop", "size": CROP, "scale": (0.25, 1)}
        field = {"ops": [{"op": "decode"}, crop], "codec": codec, "variants": 1}
        recipe = precache.Recipe.from_dict({"fields": {"image": field}})
        precache.build(source, store, recipe, address="serial", max_failures=0)
        touch(files_of(store))
        return store


def decodes(path: Path) -> bool:
    """Whether libjpeg-turbo alone makes RGB of it."""
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(path.read_bytes())
    except ValueError:
        return False
    return True


def multiply(files: Sequence[Path], root: Path, count: int, folder: Path) -> Path:
    """`count` photos in `folder`: links to `files`, each under as many names as it takes."""
    for number, path in zip(range(count), itertools.cycle(files), strict=False):
        name = f"{path.stem}_{number // len(files):04d}{path.suffix}"
        link(path, folder / path.relative_to(root).with_name(name))
    return folder


def link(path: Path, target: Path) -> None:
    """The same file under another name, which may have it already."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return
    try:
        target.hardlink_to(path)
    except OSError:  # another file system, or files of another owner
        shutil.copyfile(path, target)
