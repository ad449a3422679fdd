"""Labels that come with the samples of a Python dataset, and its attribute `targets`."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import precache
from precache.cli import main as command_line
from precache.errors import ChoiceError, SourceError
from tests.support import building
from tests.support.building import labels, pixels

CODE = """
import collections
import io
import numpy as np
import torch
from PIL import Image
try:
    import pandas
except ModuleNotFoundError:
    pandas = None

Named = collections.namedtuple("Named", ["image", "index", "label"])
Numbered = collections.namedtuple("Numbered", ["image", "index"])
Turned = collections.namedtuple("Turned", ["label", "image"])
Grouped = collections.namedtuple("Grouped", ["image", "idx", "category"])

def image(n):
    return np.full((8, 8, 3), n, np.uint8)

def jpeg(n):
    buffer = io.BytesIO()
    Image.fromarray(image(n)).save(buffer, "JPEG")
    return buffer.getvalue()

class Data:
    {members}

    def __len__(self):
        return 6

    def __getitem__(self, n):
        return {item}
"""
USUAL = ("cls", "category", "category_id", "class_id", "class", "Y")
IMAGE = precache.Recipe.image()

Module = Callable[..., str]
build = functools.partial(building.build, recipe=IMAGE)


@pytest.fixture
def source(module: Callable[[str], str]) -> Module:
    """A writer of datasets of six samples, which returns the name of each as a source."""

    def write(item: str, members: str = "pass") -> str:
        return f"python:{module(CODE.format(item=item, members=members))}:Data"

    return write


def fields(**inputs: str | int) -> precache.Recipe:
    ops = {"image": [{"op": "decode"}]}
    return precache.Recipe.from_dict(
        {"fields": {n: {"input": i, "ops": ops.get(n, [])} for n, i in inputs.items()}}
    )


def in_order(store: Path) -> list[Any]:
    found = labels(store)
    return [found[str(n)] for n in range(6)]


ONE_NUMBER = [
    "n % 3", "np.int64(n % 3)", "np.uint8(n % 3)", "torch.tensor(n % 3)", "np.array(n % 3)",
    "np.array([n % 3])", "torch.tensor([n % 3])", "[n % 3]", "(n % 3,)", "np.array([[n % 3]])",
]  # fmt: skip


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        *((f"(image(n), {label})", [0, 1, 2] * 2) for label in ONE_NUMBER if "[n" not in label),
        *((f"{{'image': image(n), 'y': {label}}}", [0, 1, 2] * 2) for label in ONE_NUMBER),
        ("(image(n), n > 2)", [0, 0, 0, 1, 1, 1]),
        ("(image(n), torch.tensor(n > 2))", [0, 0, 0, 1, 1, 1]),
        ("(image(n), n - 1)", [-1, 0, 1, 2, 3, 4]),
        ("(image(n), None)", [-1] * 6),
        ("image(n)", [-1] * 6),
        ("(image(n),)", [-1] * 6),
        ("{'label': n, 'image': image(n)}", list(range(6))),
        ("{0: image(n), 1: n}", list(range(6))),
        ("{1: n, 0: image(n)}", list(range(6))),
        ("{'image': image(n), 'labels': n, 'target': np.array([n])}", list(range(6))),
        ("Named(image(n), 5, n)", list(range(6))),
        ("Numbered(image(n), n)", [-1] * 6),
        ("Turned(n, image(n))", list(range(6))),
        ("Grouped(image(n), n, n % 2)", [0, 1, 0, 1, 0, 1]),
        *((f"{{'{name}': n, 'img': image(n), 'idx': 7}}", list(range(6))) for name in USUAL),
        ("{'image': image(n), 'label': n, 'category': 'x', 'category_id': 9}", list(range(6))),
        ("{'image': image(n), 'label': None, 'category': 3}", [-1] * 6),
        ("{'image': image(n), 'cls': None}", [-1] * 6),
        ("{'image': image(n), 'image_id': n, 'idx': n, 'file_name': 'x'}", [-1] * 6),
        ("{'image': image(n), 'width': 8, 'height': 8}", [-1] * 6),
        ("{'image': image(n), 'boxes': np.ones((1, 4)), 'embedding': np.arange(9) / 9}", [-1] * 6),
        ("{'image': image(n), 'objects': {'category': [1, 2]}, 'camera': {'f': 1.8}}", [-1] * 6),
        ("(image(n), 'cba'[n % 3])\n    classes = ['c', 'b', 'a']", [0, 1, 2] * 2),
        (
            "{'image': image(n), 'y': np.str_('ba'[n % 2])}\n    class_to_idx = {'b': 0, 'a': 1}",
            [0, 1] * 3,
        ),
    ],
)
def test_labels_that_are_understood(
    item: str, expected: list[int], source: Module, tmp_path: Path
) -> None:
    build(source(item), tmp_path / "store")
    assert in_order(tmp_path / "store") == expected


REFUSED = [
    ("(image(n), 'cat')", r"item 1 is the text 'cat'.*Give the dataset an attribute `targets`"),
    ("(image(n), 'b')\n    classes = ['a', 'b', 'b']", r"is the text 'b', and not one name"),
    ("(image(n), 0.33)", r"item 1 is the float 0\.33.*Give the dataset an attribute `targets`"),
    ("(image(n), np.float32(2))", r"item 1 is the float32 2\.0, .*Return int\(label\)"),
    ("(image(n), 2**63)", r"item 1 is the int 9223372036854775808"),
    ("(image(n), -5)", r"item 1 is the int -5"),
    ("(image(n), np.eye(6)[n])", r"item 1 is ndarray float64 \(6,\)"),
    ("(image(n), torch.eye(6)[n])", r"item 1 is Tensor float32 \(6,\)"),
    ("(image(n), torch.tensor([1, 0, 1]))", r"item 1 is Tensor int64 \(3,\)"),
    ("(image(n), [n, 7])", r"item 1 is the list \[\d, 7\]"),
    ("(image(n), (n, 7))", r"item 1 is the tuple \(\d, 7\)"),
    ("(image(n), [None, 7])", r"item 1 is the list \[None, 7\]"),
    ("(image(n), [jpeg(n), 1])", r"item 1 is the list \[bytes \(\d+ B\), 1\]"),
    ("(image(n), [])", r"item 1 is the list \[\]"),
    ("(image(n), [[0, 0, 4, 4.5]])", r"item 1 is the list \[\[0, 0, 4, 4\.5\]\]"),
    ("(image(n), image(n)[..., 0])", r"item 1 is ndarray uint8 \(8, 8\)"),
    ("(image(n), Image.new('L', (8, 9)))", r"item 1 is Image L 8 x 9.*input = 1"),
    ("(image(n), {'boxes': [], 'labels': [1]})", r"item 1 is the dict \{'boxes': \[\], 'la"),
    ("{'image': image(n), 'labels': [n, 1]}", r"'labels' is the list \[\d, 1\].*input ="),
    ("{'image': image(n), 'label': 'cat'}", r"'label' is the text 'cat'"),
    ("{'image': image(n), 'label': n, 'target': 9}", r"'label' is \d and 'target' is 9"),
    ("(image(n), n, n + 1)", r"item 1 is \d and item 2 is \d"),
    ("(n, jpeg(n))", r"item 0 is the int \d and item 1 is bytes \(\d+ B\): return"),
    ("(n, Image.new('L', (8, 9)))", r"item 0 is the int \d and item 1 is Image L 8 x 9"),
]  # fmt: skip


@pytest.mark.parametrize(("item", "why"), REFUSED)
def test_other_labels_end_the_build_and_the_plan_with_its_type_and_shape(
    item: str, why: str, source: Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = source(item)
    with pytest.raises(SourceError, match=f"sample [0-5] of user_code_.*{why}") as caught:
        build(name, tmp_path / "store")
    assert "\\x" not in str(caught.value)
    assert len(str(caught.value)) < 700
    assert not (tmp_path / "store/commits").exists()
    if item not in (REFUSED[0][0], REFUSED[-1][0]):
        return
    with pytest.raises(SourceError, match=why):
        precache.plan(name, tmp_path / "store", IMAGE, address="serial")
    assert command_line.main(["build", name, str(tmp_path / "store"), "--address", "serial"]) == 2
    assert "Traceback" not in capsys.readouterr().err


MAYBE = [
    ("'age': n + .5", r"'age' \(the float \d\.5\) may be one"),
    ("'onehot': np.eye(3)[n % 3]", r"'onehot' \(ndarray float64 \(3,\).* may be one"),
    (
        "'meta': {'label': n, 'camera': 'x'}",
        r"'meta' \(the dict \{'camera': 'x', 'label'.* may be",
    ),
    ("'fine_label': n, 'coarse_label': n % 2", r"'fine_label' .* or 'coarse_label' .* may be one"),
    ("'sex': 'f', 'age': 33", r"'sex' .* or 'age' .* may be one"),
]


@pytest.mark.parametrize(
    ("item", "why", "ways"),
    [
        *((f"{{'image': image(n), {maybe}}}", why, [f"'label': None, {maybe}", "'label': 3"])
          for maybe, why in MAYBE),
        ("{'image': image(n), 'breed': 3}", r"'breed' \(the int 3\) may be one",
         ["'label': None, 'breed': 3", "'label': 3"]),
        ("{'image': image(n), 'breed': 'cat', 'idx': n}", r"'breed' \(the text 'cat'\) may be",
         ["'label': None, 'breed': 'cat'", "'idx': n}\n    targets = ['cat'] * 6 #"]),
        ("{'image': image(n), 'category': 'x', 'category_id': 3}",
         r"'category' \(the text 'x'\) or 'category_id' \(the int 3\) may be",
         ["'label': 3", "'label': None"]),
        ("image(n)\n    labels = [0, 1] * 3", "an attribute `labels`.*call it `targets`",
         ["image(n)\n    targets = [0, 1] * 3", "(image(n), None)\n    labels = [0, 1] * 3"]),
    ],
)  # fmt: skip
def test_samples_that_would_all_lack_a_label_that_they_may_bring_are_refused(
    item: str, why: str, ways: list[str], source: Module, tmp_path: Path
) -> None:
    """Each way that the message offers builds."""
    for command in (precache.build, *([precache.plan] if "labels =" in item else [])):
        with pytest.raises(SourceError, match=why):
            command(source(item), tmp_path / "store", IMAGE, address="serial")
    assert not (tmp_path / "store/commits").exists()
    for number, way in enumerate(ways):
        mended = way if "image(n)" in way else f"{{'image': image(n), {way}}}"
        build(source(mended), tmp_path / f"{number}.store")
        known = np.array(in_order(tmp_path / f"{number}.store")) >= 0
        assert known.all() == ("None" not in way)
    (tmp_path / "labels.csv").write_text("".join(f"{n},{n % 2}\n" for n in range(6)))
    build(source(item), tmp_path / "given.store", labels=tmp_path / "labels.csv")


@pytest.mark.parametrize(
    ("item", "address"),
    [("n if n != 4 else 0.5", "local"), ("[n] if n != 4 else [n, 1]", "serial")],
)
def test_one_label_of_another_kind_ends_a_build(
    item: str, address: str, source: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the samples that are measured first do not show it."""
    monkeypatch.setattr("precache_workers.profiling.row_probe.PROBE_SAMPLES", 1)
    name = source(f"(image(n), {item})")
    with pytest.raises(SourceError, match=r"sample 4 of .*: item 1 is"):
        build(name, tmp_path / "store", address=address, cpus=1, accept_missing=True)
    assert not (tmp_path / "store/commits").exists()


def test_what_a_field_reads_is_no_label(source: Module, tmp_path: Path) -> None:
    pair = "(image(n), image(n)[..., 0])"
    build(source(pair), tmp_path / "a.store", recipe=fields(image=0, mask=1))
    assert in_order(tmp_path / "a.store") == [-1] * 6
    assert pixels(tmp_path / "a.store", "mask")["3"].max() == 3
    masked = source("(image(n), image(n)[..., 0], n)")
    build(masked, tmp_path / "b.store", recipe=fields(image=0, mask=1))
    assert in_order(tmp_path / "b.store") == list(range(6))
    build(source("(n, image(n))"), tmp_path / "c.store", recipe=fields(image=1))
    assert in_order(tmp_path / "c.store") == list(range(6))
    item = "{'image': image(n), 'target': image(n)[..., 0], 'label': n}"
    build(source(item), tmp_path / "d.store", recipe=fields(image="image", mask="target"))
    assert in_order(tmp_path / "d.store") == list(range(6))
    assert pixels(tmp_path / "d.store", "mask")["3"].max() == 3


def test_a_sample_without_its_input_is_a_hole_and_no_field_takes_another(
    source: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that a later build adds, which measures no rows."""
    item = "{**({'image': image(n)} if n % 7 != 4 else {}), 'depth': image(9)}"
    given, store = source(item), tmp_path / "store"
    data = f"{given.removeprefix('python:').replace(':', '.')}.__len__"
    for count, failed in (6, 1), (13, 2):
        monkeypatch.setattr(data, lambda self, count=count: count)
        assert build(given, store, max_failures=2, shard_samples=4).failed == failed
        stored = {key: row.max() for key, row in pixels(store).items()}
        assert stored == {str(n): n for n in range(count) if n % 7 != 4}


NAMED = "__import__('collections').namedtuple('Item', 'photo n label')(image(n), n, n)"
MASKED = "(image(n), image(n)[..., 0])"
PARTS = "{'photo': image(n), 'seg': image(n)[..., 0], 'label': n}"
LACKING = "{**({'photo': image(n)} if n % 3 else {}), 'depth': image(9), 'label': n}"
LEFT = "{'left': image(n), 'right': image(n + 9)}"
TURNS = f"{{**dict(sorted({LEFT}.items(), reverse=n % 2)), 'y': n}}"
QUOTED = r"field 'mask' has input = \"1\".*input = 1, without q"
UNNAMED = r"field mask names no input.*input = \"seg\" in \[fields.mask\]"


@pytest.mark.parametrize(
    ("item", "given", "why", "mended"),
    [
        (MASKED, {"image": 0, "mask": "1"}, QUOTED, {"image": 0, "mask": 1}),
        ("(image(n), n, image(n))", {"image": 0, "mask": "1"}, QUOTED, {"image": 0, "mask": 2}),
        ("{'0': image(n), '1': image(n)[..., 0], 'label': n}", {}, "", {"image": "0", "mask": "1"}),
        (NAMED, {"image": "photo"}, r"input = \"photo\".*write input = 0,", {"image": 0}),
        ("(image(n), n)", {"image": "photo"}, r"\"photo\".*write input = 0 to 1", {"image": 0}),
        (PARTS, {"image": None, "mask": None}, UNNAMED, {"image": None, "mask": "seg"}),
        (PARTS, {"image": "photo", "mask": None}, UNNAMED, {"image": "photo", "mask": "seg"}),
        (LACKING, {"image": None}, r"'depth' in sample 0 and .*'photo' in", {"image": "photo"}),
        (TURNS, {"image": None}, r"'left' in sample 0 and .*'right' in", {"image": "left"}),
    ],
)  # fmt: skip
def test_inputs_that_name_no_one_part_are_refused_with_those_that_do(
    item: str, given: Any, why: str, mended: Any, source: Module, tmp_path: Path
) -> None:
    name, store = source(item), tmp_path / "store"
    if why:
        with pytest.raises((SourceError, precache.RecipeError), match=f"(?s){why}"):
            build(name, store, recipe=fields(**given))
    build(name, store, recipe=fields(**mended), max_failures=2)
    for field in mended:
        found = {key: row.max() for key, row in pixels(store, field).items()}
        assert found == {str(n): n for n in range(6) if item is not LACKING or n % 3}


def test_a_dataset_without_a_sample_says_why(source: Module, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none of the 6 samples tried has a row: 0: .*division"):
        build(source("{'photo': 1 // 0, 'label': n}"), tmp_path / "store")


def test_labels_of_a_request_make_those_of_the_samples_unused(
    source: Module, tmp_path: Path
) -> None:
    (tmp_path / "labels.csv").write_text("".join(f"{n},{n % 2}\n" for n in range(6)))
    recipe = precache.Recipe.image(random_resized_crop=4, variants=2)
    given = {"recipe": recipe, "labels": tmp_path / "labels.csv"}
    build(source("(image(n), 'cat')"), tmp_path / "store", **given)
    assert in_order(tmp_path / "store") == [0, 1, 0, 1, 0, 1]
    precache.refresh(tmp_path / "store", run_functions=True, address="serial")
    assert in_order(tmp_path / "store") == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("item", "recipe", "line"),
    [
        ("{'image': image(n), 'caption': 'x', 'index': n}", IMAGE,
         "No field reads 'caption' (the text 'x'), 'index' (the int"),
        ("(image(n), n % 2, 'x')", IMAGE, "No field reads item 2 (the text 'x')"),
        ("(image(n), n % 2)", IMAGE, "Labels are item 1 of the samples"),
        ("(image(n), n % 2)", IMAGE, "(to take another part, return a dict with it as 'label')"),
        ("{'image': image(n), 'b': n, 'label': 7}", IMAGE, "Labels are 'label' of the sam"),
        ("{'image': image(n), 'y': n}", IMAGE, "Labels are 'y' of the samples"),
        ("{'image': image(n)}", IMAGE, "Samples bring no label"),
        ("(image(n), n)\n    targets = list(range(6))", IMAGE, "Labels are the attribute"),
        ("image(n)\n    targets = [[__file__]] * 6", IMAGE, "`targets` of the dataset has paths"),
    ],
)  # fmt: skip
def test_a_line_names_the_label_and_what_nobody_reads(
    item: str,
    recipe: precache.Recipe,
    line: str,
    source: Module,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, store = source(item), str(tmp_path / "store")
    for command in ("plan", "build"):
        assert command_line.main([command, name, store, "--address", "serial"]) == 0
        assert line in " ".join(capsys.readouterr().err.split()), command


def test_samples_without_a_label_among_others_are_counted(
    source: Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(source("(image(n), n if n != 4 else None)"), tmp_path / "store")
    assert "1 of 6 samples have no label (-1), such as 4\n" in caplog.text


def test_class_numbers_from_1_that_come_with_samples_are_said(
    source: Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(source("(image(n), n + 1)"), tmp_path / "store")
    assert "Class numbers are from 1 to 6, and no sample has 0" in caplog.text


# --- targets ------------------------------------------------------------------------------------

TEXTS = "['b', 'a', 'c', 'b', 'a', 'c']"


@pytest.mark.parametrize(
    ("targets", "classes", "expected", "names"),
    [
        (TEXTS, "None", [1, 0, 2, 1, 0, 2], ("a", "b", "c")),
        (f"np.array({TEXTS})", "()", [1, 0, 2, 1, 0, 2], ("a", "b", "c")),
        (f"np.array({TEXTS}, object)", "()", [1, 0, 2, 1, 0, 2], ("a", "b", "c")),
        (TEXTS, "['c', 'b', 'a']", [1, 2, 0, 1, 2, 0], ("c", "b", "a")),
        (TEXTS, "{'c': 0, 'b': 1, 'a': 2}", [1, 2, 0, 1, 2, 0], ("c", "b", "a")),
        (TEXTS, "None\n    class_to_idx = {'c': 0, 'b': 1, 'a': 2}", [1, 2, 0] * 2,
         ("c", "b", "a")),
        (TEXTS, "['c', 'b', 'a']\n    class_to_idx = {'c': 0, 'a': 2}", [1, 2, 0] * 2,
         ("c", "b", "a")),
        (f"pandas.Categorical({TEXTS}, list('dcba'))", "()", [2, 3, 1] * 2, ("d", "c", "b", "a")),
        (f"pandas.Series(pandas.Categorical({TEXTS}, list('cba')))", "()", [1, 2, 0] * 2,
         ("c", "b", "a")),
        ("['a', None, 'b', 'a', 'a', 'b']", "()", [0, -1, 1, 0, 0, 1], ("a", "b")),
        ("[0, None, 1, 0, 0, 1]", "()", [0, -1, 1, 0, 0, 1], ()),
        ("pandas.Series([0, 1, 2, 0, 1, 2], [5, 4, 3, 2, 1, 0])", "()", [0, 1, 2, 0, 1, 2], ()),
        ("[1, 0, 1, 0, 1, 0]", "{1: 'b', 0: 'a'}", [1, 0, 1, 0, 1, 0], ("a", "b")),
        ("torch.arange(6) / 2", "()", [0, 0.5, 1, 1.5, 2, 2.5], ()),
        ("torch.eye(6)", "()", np.eye(6).tolist(), ()),
        ("np.arange(6)[:, None] % 3", "()", [0, 1, 2, 0, 1, 2], ()),
        ("pandas.DataFrame({'a': [0, 1, 2] * 2})", "()", [0, 1, 2, 0, 1, 2], ()),
    ],
)  # fmt: skip
def test_targets_may_be_of_any_kind(
    targets: str, classes: str, expected: list[Any], names: Any, source: Module, tmp_path: Path
) -> None:
    members = f"targets = {targets}\n    classes = {classes}"
    if "pandas" in targets:
        pytest.importorskip("pandas")
    by_place = re.match(r"pandas\.(Series|DataFrame)", targets)
    label = "self.targets.iloc[n]" if by_place else "self.targets[n]"
    build(source("image(n)", members), tmp_path / "store")
    assert in_order(tmp_path / "store") == expected
    assert precache.open(tmp_path / "store").classes == names
    build(source(f"(image(n), {label})", members), tmp_path / "both.store")
    assert in_order(tmp_path / "both.store") == expected
    assert precache.verify(tmp_path / "both.store").ok


ABC, NUMBERED = "classes = ['a', 'b', 'c']", "[0, 1, 2, 0, 1, 2]"
KEYED = "def fingerprint(self, n): return str(n)"
DIFFER = r"sample \d of .* item 1 is .*, and targets\[\d\] is"
BESIDE_LABELS: list[tuple[str, str, str, str]] = [
    ("np.eye(3)[n % 3]", NUMBERED, ABC, ""),
    ("n % 3", "np.eye(3)[[0, 1, 2, 0, 1, 2]]", ABC, ""),
    ("n % 3", "['a', 'b', 'c'] * 2", ABC, ""),
    ("'abc'[n % 3]", NUMBERED, ABC, ""),
    ("[[0], [1], [2], [0], [1], [0, 2]][n]", "[[0], [1], [2], [0], [1], [0, 2]]", ABC, ""),
    ("Image.new('L', (8, 8))", NUMBERED, ABC, ""),
    ("n % 2", NUMBERED, "pass", DIFFER),
    ("n % 2", NUMBERED, KEYED, DIFFER),
    ("np.eye(3)[n % 2]", NUMBERED, "pass", DIFFER),
    ("'cba'[n % 3]", "['a', 'b', 'c'] * 2", "pass", DIFFER),
    ("'cba'[n % 3]", "['a', 'b', 'c'] * 2", KEYED, DIFFER),
    ("n + 0.25", "[.5, 1.5, 2.5, 3.5, 4.5, 5.5]", "pass", DIFFER),
    ("np.eye(3)[n % 2]", "np.eye(3)[[0, 1, 2, 0, 1, 2]]", "pass", DIFFER),
    ("[0, 1, 0]", "[['a', 'b']] * 6", KEYED, DIFFER),
    ("n % 3", TEXTS, "classes = ['a', 'b']", "number 2 is 'c', .* not among its classes: 'a', 'b'"),
    ("n % 3", NUMBERED, "classes = ['a', 'b']", r"class number 2.* 2 classes"),
    ("n % 3", "None", "classes = ['a', 'b']", r"item 1 is 2, .* 2 classes"),
    ("n % 3", "None", "classes = 3", "classes are the int 3; .* list of the names"),
    ("n % 3", "None", "classes = 'cat dog'", "classes are the text 'cat dog'"),
    ("n % 3", "None", "classes = {'a', 'b'}", "classes are .*set"),
    ("n % 3", "None", "classes = {'a': 1, 'b': 2}", "classes are the dict .* numbers from 0"),
    ("n % 3", "['a', 1] * 3", "pass", "targets are names and numbers, such as a and 1;"),
    ("n % 3", "{n: n for n in range(6)}", "pass", r"targets are object \(\)"),
    ("n % 3", "'abcabc'", "pass", r"targets are <U6 \(\)"),
    ("n % 3", "[[.5, .5]] * 6", "pass", r"target of sample 0 is \[0\.5, 0\.5\]"),
    ("n % 3", "[b'cat'] * 6", "pass", "target of sample 0 is b'cat'; a label is a class, a number"),
    ("'bac'[n % 3]", TEXTS, f"{ABC}; class_to_idx = {{'b': 0}}", "'b' is number 1 .* and 0 by"),
    (
        "'bac'[n % 3]",
        TEXTS,
        "class_to_idx = {'a': 1, 'b': 2, 'c': 3}",
        "without the numbers from 0 up",
    ),
]
"""Label of sample n, the attribute `targets`, other members, and why they are refused."""


@pytest.mark.parametrize(("label", "targets", "members", "why"), BESIDE_LABELS)
def test_targets_and_classes_that_labels_of_samples_agree_with_or_not(
    label: str, targets: str, members: str, why: str, source: Module, tmp_path: Path
) -> None:
    name = source(f"(image(n), {label})", f"targets = {targets}\n    {members}")
    if why:
        with pytest.raises(SourceError, match=why):
            build(name, tmp_path / "store")
    else:
        build(name, tmp_path / "store")


@pytest.mark.parametrize(
    ("parts", "classes"),
    [
        ([ABC, ABC], ("a", "b", "c")),
        (["pass", "pass"], ()),
        ([ABC, "pass"], ()),
        ([ABC, "classes = ['b', 'a', 'c']"], "'a', 'b', 'c', and 'b', 'a', 'c', each numbered"),
    ],
)
def test_datasets_of_torch_have_the_classes_of_all_that_they_hold(
    parts: list[str],
    classes: tuple[str, ...] | str,
    module: Callable[[str], str],
    source: Module,
    tmp_path: Path,
) -> None:
    members = [f"{part}; held = torch.arange(6)" for part in parts]
    item = "(Image.fromarray(image(n)), n % 3)"
    first, second = (source(item, part).split(":")[1] for part in members)
    both = f"ConcatDataset([{first}.Data(), {second}.Data()])"
    for number, of in enumerate((both, f"Subset({both}, [1])")):
        code = f"import {first}, {second}\nfrom torch.utils.data import *\nphotos = lambda: {of}"
        name, store = f"python:{module(code)}:photos", tmp_path / f"{number}.store"
        if isinstance(classes, str):
            with pytest.raises(SourceError, match=classes):
                build(name, store)
        else:
            build(name, store)
            assert precache.open(store).classes == classes
            if number:
                assert labels(store) == {"0": 1}
                assert (pixels(store)["0"] == 1).all()


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ("'NaN'", r"'NaN' are words for .*. Choose: `--no-label NaN` for 2 cl"),
        ("'Cat'", r"'Cat' and 'cat', which look alike. .* by --classes"),
    ],
)
def test_names_in_targets_that_may_be_no_classes_are_refused(
    odd: str, why: str, source: Module, tmp_path: Path
) -> None:
    given = f"targets = [{odd}, *['cat', 'dog'] * 2, {{}}]"
    with pytest.raises(SourceError, match=why):
        build(source("image(n)", given.format("'cat'")), tmp_path / "store")
    classes = f"    classes = [{odd}, 'dog', 'cat']"
    build(source("image(n)", f"{given.format(odd)}\n{classes}"), tmp_path / "store")
    assert in_order(tmp_path / "store") == [0, 2, 1, 2, 1, 0]
    if "--classes" in why:
        (tmp_path / "names.txt").write_text("cat\nCat\ndog\n")
        name = source("image(n)", given.format("'cat'"))
        build(name, tmp_path / "store", classes=str(tmp_path / "names.txt"))
        assert in_order(tmp_path / "store") == [1, 0, 2, 0, 2, 0]


@pytest.mark.parametrize(
    ("targets", "why", "choices"),
    [
        ("np.array([np.nan, 1, 2] * 2)", "fraction that is zero.*2 of 6 have none",
         {"number": [-1, 1, 2] * 2, "value": [-9, 1.0, 2.0] * 2}),
        ("[0., 1., 2.] * 2", "fraction that is zero", {"number": [0, 1, 2] * 2}),
        ("[-1, 1] * 3", "targets such as .* are 1 and -1",
         {"name": [0, 1] * 3, "number": [-1, 1] * 3}),
        ("np.array([-1, 1] * 3)", "targets such as .* are 1 and -1", {"name": [0, 1] * 3}),
        ("[-99, 1] * 3", "such as '-99' are below -1", {"name": [0, 1] * 3}),
        ("['a|b', 'b', 'a'] * 2", "several classes",
         {"name": [1, 2, 0] * 2, "|": [[1, 1], [0, 1], [1, 0]] * 2}),
    ],
)  # fmt: skip
def test_targets_of_two_readings_are_refused_as_a_column_is_and_flags_decide(
    targets: str, why: str, choices: dict[str, list[Any]], source: Module, tmp_path: Path
) -> None:
    name = source("(image(n), self.targets[n])", f"targets = {targets}")
    with pytest.raises(ChoiceError, match=why):
        build(name, tmp_path / "store")
    for number, (choice, expected) in enumerate(choices.items()):
        flag = "label_separator" if choice == "|" else "label_kind"
        build(name, tmp_path / f"{number}.store", **{flag: choice})
        assert np.nan_to_num(in_order(tmp_path / f"{number}.store"), nan=-9).tolist() == expected


def test_flags_for_labels_that_come_with_samples_are_refused(
    source: Module, tmp_path: Path
) -> None:
    with pytest.raises(precache.UsageError, match="has no attribute `targets`"):
        build(source("(image(n), n)"), tmp_path / "store", label_kind="name")
    with pytest.raises(SourceError, match="labels of the samples are 1 and -1"):
        build(source("(image(n), n % 2 * 2 - 1)"), tmp_path / "store")
    build(source("(image(n), n % 2 or None)"), tmp_path / "store")


def test_numbers_as_names_in_targets_are_sorted_as_text_with_a_line(
    source: Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = source("image(n)", "targets = ['10', '9'] * 3")
    build(name, tmp_path / "store", progress=True)
    assert "'10' comes before '9' (--class-order number" in capsys.readouterr().err
    assert in_order(tmp_path / "store") == [0, 1] * 3
    build(name, tmp_path / "store", class_order="number")
    assert in_order(tmp_path / "store") == [1, 0] * 3
