"""The code blocks of README and the guides run as they stand, on a small folder of photos.

Commands that need a bucket, a cluster or a browser, or that never end, are not run. Code of other
libraries runs where they are installed, and is compiled elsewhere.
"""

import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image

import precache
import precache.transforms
from precache.cli import main as command_line
from tests.conftest import write_photos
from tests.support.building import encoded, write

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCK = re.compile(
    r"(?:<!-- (not run|needs): (.*?) -->\n)?```(python|sh|toml)\n(.*?)```", re.DOTALL
)
CONSOLE = re.compile(r"```console\n\$ (precache .*?)\n(.*?)```", re.DOTALL)
MASKS = (
    (r"(?: \(± \d+%\)|, waiting for the source|, limited by reading the source)", ""),
    (r"\b[0-9a-f]{8}(?:[0-9a-f]{24})?\b", "ID"),
    (r"(?i)\b\w+/\w+\.jpe?g", "KEY"),
    (r"-?\d+(?:,\d{3})*(?:\.\d+)?", "#"),
    (r"# (?:[KMG]?B|s|min|cores?)\b", "# UNIT"),
    (r"[▁▂▃▄▅▆▇█·]+", "BARS"),
    (r"[ \n]+", " "),
)
"""Patterns of what varies between machines and folders of photos, and what stands for it."""
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
HEADING = re.compile(r"^#+ (.*)", re.MULTILINE)

BATCH_SIZE = re.compile(r"(?<=batch_size=)\d+|(?<=Loader\(version, )\d+|(?<=\.store\", )\d+")
"""Of which the example has no batch."""
NOT_RUN = re.compile(r"://|\bJOB\b|precache view")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``photos/`` and ``masks/``, and with ``photos.store`` in two versions.

    Before the second, a photo was removed, and one was added that is of no class.
    """
    folder = tmp_path_factory.mktemp("example")
    write_photos(folder / "photos", 24, (260, 258), classes=("cat", "dog"), suffix=".jpg")
    for photo in (folder / "photos").rglob("*.jpg"):
        mask = Image.new("L", (258, 260), len(photo.name))
        mask.putpalette(bytes(range(256)) * 3)
        place = folder / "masks" / photo.relative_to(folder / "photos").with_suffix(".png")
        write(place, encoded(mask, "PNG"))
    write_boxes(folder)
    photo = next((folder / "photos/cat").iterdir())
    for crop in (200, 224):
        if crop == 224:
            photo.rename(folder / "photos" / photo.name)
        recipe = precache.Recipe.image(resize=256, crop=crop)
        precache.build(folder / "photos", folder / "photos.store", recipe, address="serial")
    return folder


def write_boxes(folder: Path) -> None:
    """Write some photos with labels of boxes, as COCO has them, into ``coco/``."""
    images, annotations = [], []
    for number, photo in enumerate(sorted((folder / "photos").rglob("*.jpg"))[:16]):
        write(folder / "coco/train" / photo.name, photo.read_bytes())
        images.append({"id": number, "file_name": photo.name})
        for place in range(number % 4):
            box = [9 * number % 200, 50 * place, 50, 40 + place]
            one = {"image_id": number, "category_id": 1 + place, "bbox": box, "iscrowd": 0}
            annotations.append(one)
    labels = json.dumps({"images": images, "annotations": annotations})
    write(folder / "coco/annotations/instances_train.json", labels.encode())


def blocks(document: Path, mark: str = "") -> Iterator[tuple[str, str, str]]:
    """(note of the mark, language, code) of each block with this mark, or with none."""
    for marked, note, language, code in BLOCK.findall(document.read_text("utf-8")):
        if marked == mark:
            yield note, language, code


def commands(code: str) -> Iterator[list[str]]:
    """Arguments of each `precache` command that is to be run."""
    for line in code.splitlines():
        if line.startswith("precache ") and not NOT_RUN.search(line):
            yield shlex.split(line, comments=True)[1:]


def run_command(arguments: list[str]) -> None:
    version = precache.open("photos.store").attributes.version
    arguments = [text.replace("@3f2a", f"@{version[:4]}") for text in arguments]
    if arguments[0] in ("build", "refresh", "plan", "doctor"):
        arguments += ["--address", "serial"]
    if arguments[0] == "doctor":
        arguments += ["--samples", "16", "--seconds", "1"]
    assert command_line.main(arguments) == 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_code_blocks_of_the_documentation_run(
    document: Path, example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example)
    monkeypatch.syspath_prepend(example)
    model = torch.nn.Linear(1, 1)
    names = {
        "precache": precache,
        "Loader": precache.Loader,
        "step": lambda *batch: None,
        "model": model,
        "net": torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()),
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    for _, language, code in blocks(document):
        module = re.match(r"# (\w+\.py)\n", code)
        if module:
            Path(module[1]).write_text(code)
        elif language == "toml":
            Path("recipe.toml").write_text(code)
        elif language == "sh":
            for arguments in commands(code):
                run_command(arguments)
        else:
            shorter = BATCH_SIZE.sub("16", code.replace("range(90)", "range(2)"))
            with precache.Loader("photos.store", 8) as loader:
                exec(compile(shorter, document.name, "exec"), names | {"loader": loader})


def masked(text: str) -> str:
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text)
    return text.strip()


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``photos/`` of many shapes, of which some came, changed and went since a build.

    All others of a few shards, and some of each other one, are as they were.
    """
    pytest.importorskip("skimage", reason="the photos need scikit-image")
    from tests.demo.photos import make_photos

    folder = tmp_path_factory.mktemp("changed")
    made = make_photos(folder / "photos", 122)
    for key in ("README.txt", *made.broken):
        (made.folder / key).unlink()
    recipe = precache.Recipe.image(resize=256, crop=224)
    precache.build(made.folder, folder / "photos.store", recipe, address="serial")
    whole = [made.folder / key for key in made.keys if key not in made.broken]
    for number in range(7):
        write(whole[0].with_name(f"new{number}.jpg"), whole[number].read_bytes() + b"\0")
    for photo in whole[10:13]:
        write(photo, photo.read_bytes() + b"\0")
    whole[20].unlink()
    return folder


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(*block, id=block[0].split()[1])
        for document in DOCUMENTS
        for block in CONSOLE.findall(document.read_text("utf-8"))
    ],
)
def test_commands_print_what_the_documentation_shows(
    line: str,
    expected: str,
    changed: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Up to an ellipsis, and with all figures masked."""
    monkeypatch.chdir(changed)
    command = shlex.split(line)[1:]
    here = ["--address", "serial"] if command[0] in ("plan", "doctor") else []
    short = ["--seconds", "4"] if command[0] == "doctor" else []
    assert command_line.main([*command, *here, *short]) == 0
    shown, left_out, _ = expected.partition("…\n")
    printed = masked(capsys.readouterr().out)
    assert printed[: len(masked(shown)) if left_out else None] == masked(shown)


@pytest.mark.heavy
def test_code_of_other_libraries_runs_where_they_are_installed(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As scripts, since some of it starts processes that import it."""
    monkeypatch.chdir(example)
    monkeypatch.syspath_prepend(example)
    for document in DOCUMENTS:
        for needed, language, code in blocks(document, "needs"):
            installed = all(map(find_spec, needed.split(", ")))
            if language == "sh":
                for arguments in commands(code) if installed else ():
                    run_command(arguments)
                continue
            compile(code, document.name, "exec")
            module = re.match(r"# (\w+\.py)\n", code)
            if installed:
                script = example / (module[1] if module else f"{document.stem}_peer.py")
                shorter = code.replace("range(90)", "range(1)")
                script.write_text(f"def step(*batch): assert len(batch[0])\n\n\n{shorter}")
                subprocess.run((sys.executable, script), cwd=example, check=True)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_links_of_the_documentation_lead_somewhere(document: Path) -> None:
    for path, anchor in LINK.findall(document.read_text("utf-8")):
        target = document.parent / path if path else document
        assert target.exists(), path
        if anchor:
            headings = HEADING.findall(target.read_text("utf-8"))
            assert anchor[1:] in map(anchor_of, headings), f"{path}{anchor}"


def anchor_of(heading: str) -> str:
    """Anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_documented_parameters_are_those_of_the_signature() -> None:
    for module in (precache, precache.transforms):
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            text = inspect.getdoc(value) or ""
            section = re.search(r"\nParameters\n-+\n(.*?)(\n\n\w+\n-+\n|\Z)", text, re.DOTALL)
            listed = re.findall(r"^(\S.*)$", section[1], re.MULTILINE) if section else []
            documented = {part.lstrip("*") for line in listed for part in line.split(", ")}
            assert documented <= {*inspect.signature(value).parameters}, name
