"""The scripts of docs/examples, each as a process of its own, on small photographs.

Each photo is a class of its own, so that the labels of a batch say which samples are in it.
"""

import functools
import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import precache
from tests.conftest import BuiltStore
from tests.support.building import REPOSITORY, environment, write_jpegs
from tests.support.servers import S3Server

EXAMPLES = REPOSITORY / "docs/examples"
PHOTOS = 24
BATCH = 8
EPOCH = PHOTOS // BATCH
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LOSS = re.compile(r"\bloss'?:? '?([\d.]+|nan|inf)")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    classes = [f"photo{number:02d}" for number in range(PHOTOS)]
    return write_jpegs(tmp_path_factory.mktemp("examples") / "photos", PHOTOS, (96, 80), classes)


@pytest.fixture(scope="module")
def store(photos: Path, make_store: Callable[..., BuiltStore]) -> Path:
    return make_store(photos, precache.Recipe.image(resize=72, crop=72), shard_samples=8).path


def run(
    folder: Path, script: str, *arguments: object, launcher: Sequence[str] = (), **variables: str
) -> str:
    """Run a script of docs/examples in a folder to its good end, and return what it printed."""
    folder.mkdir(parents=True, exist_ok=True)
    module = ["-m", *launcher] if launcher else []
    recorder = [REPOSITORY / "tests/support/recorded.py", folder, EXAMPLES / script]
    done = subprocess.run(
        [sys.executable, *module, *map(str, recorder), *map(str, arguments)],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def batches(folder: Path, ranks: int = 1) -> list[list[int]]:
    """Labels of each step, of all ranks together."""
    lines = [(folder / f"{rank}.jsonl").read_text().splitlines() for rank in range(ranks)]
    parts = [[json.loads(line) for line in of_rank] for of_rank in lines]
    return [list(itertools.chain(*step)) for step in zip(*parts, strict=True)]


def assert_whole_epochs(steps: list[list[int]], epochs: int) -> None:
    """Each epoch has each sample once."""
    assert len(steps) == epochs * EPOCH
    for start in range(0, len(steps), EPOCH):
        samples = itertools.chain(*steps[start : start + EPOCH])
        assert sorted(samples) == list(range(PHOTOS))


def assert_learns(printed: str) -> None:
    losses = [float(loss) for loss in LOSS.findall(printed)]
    half = len(losses) // 2
    assert half
    assert all(map(math.isfinite, losses))
    assert np.mean(losses[-half:]) < np.mean(losses[:half])


@functools.cache
def importable(module: str) -> bool:
    """Return whether a module is there and can be imported, which is tried in a process."""
    if importlib.util.find_spec(module) is None:
        return False
    command = [sys.executable, "-c", f"import {module}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def require(module: str, extra: str = ".[frameworks]") -> None:
    if not importable(module):
        pytest.skip(f"needs a working {module}: pip install '{extra}'")


# --- imagenet.py --------------------------------------------------------------------------------

RESNET = ["--depth", 18, "--width", 8, "--crop", 64, "--batch-size", BATCH, "--every", 1]


@pytest.mark.heavy
def test_all_ranks_together_see_each_sample_once_and_one_process_resumes_with_what_is_left(
    store: Path, tmp_path: Path
) -> None:
    """Two processes stop in their second epoch, after one step."""
    stopped, rest = tmp_path / "stopped", tmp_path / "rest"
    run(stopped, "imagenet.py", store, *RESNET, "--steps", EPOCH + 1, launcher=TORCHRUN)
    steps = batches(stopped, ranks=2)
    assert_whole_epochs(steps[:EPOCH], 1)
    logged = [json.loads(line) for line in (stopped / "losses.jsonl").read_text().splitlines()]
    assert [step[:2] for step in logged] == [[0, 1], [0, 2], [0, 3], [1, 1]]
    assert all(math.isfinite(loss) for _, _, loss in logged)
    checkpoint = ["--checkpoint", stopped / "checkpoint.pt", "--resume"]
    run(rest, "imagenet.py", store, *RESNET, *checkpoint, "--epochs", 3)
    assert_whole_epochs([*steps[EPOCH:], *batches(rest)], 2)


@pytest.mark.heavy
def test_imagenet_learns_from_whole_photos_and_validates(
    photos: Path, store: Path, tmp_path: Path, make_store: Callable[..., BuiltStore]
) -> None:
    whole = make_store(photos, precache.Recipe.image(max_size=90), shard_samples=8).path
    printed = run(
        tmp_path, "imagenet.py", whole, *RESNET, "--val", store, "--epochs", 10, "--lr", 0.1
    )
    assert_learns(printed)
    assert printed.count("accuracy") == 10


# --- the others ---------------------------------------------------------------------------------


def test_a_custom_op_makes_the_rows(photos: Path, tmp_path: Path) -> None:
    store = tmp_path / "own.store"
    printed = run(tmp_path, "custom_op.py", photos, store, "--address", "serial")
    assert re.match(r"version +[0-9a-f]{32}\.1\n", printed)
    assert "uint8 (3, 64, 64)" in printed
    with precache.Loader(store, PHOTOS, device="cpu") as loader:
        [image] = (batch["image"] for batch in loader)
    spread = torch.histc(image.float(), 8, 0, 256) / image.numel()
    assert spread.min() > 0.06  # of 1/8 each in a flat histogram


ENSURE = ["--epochs", 6, "--lr", 0.3, "--size", 48]


@pytest.mark.heavy
def test_a_training_builds_the_store_that_it_needs(photos: Path, tmp_path: Path) -> None:
    printed = run(tmp_path, "ensure.py", photos, tmp_path / "photos.store", *ENSURE)
    assert_learns(printed)
    assert_whole_epochs(batches(tmp_path), 6)
    assert precache.verify(tmp_path / "photos.store").ok


@pytest.mark.heavy
def test_one_rank_builds_and_all_train(photos: Path, tmp_path: Path) -> None:
    store = tmp_path / "photos.store"
    batch = ["--batch-size", BATCH // 2]
    assert_learns(run(tmp_path, "ensure.py", photos, store, *ENSURE, *batch, launcher=TORCHRUN))
    assert_whole_epochs(batches(tmp_path, ranks=2), 6)
    assert len(precache.versions(store).versions) == 1


@pytest.mark.heavy
def test_a_training_is_fed_by_a_bucket(photos: Path, tmp_path: Path, s3: S3Server) -> None:
    printed = run(
        tmp_path, "ensure.py", photos, "s3://bucket/example.store", *ENSURE,
        "--address", "serial", "--cache", tmp_path / "cache", "100MB",
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{s3.port}", AWS_DEFAULT_REGION="us-east-1",
        AWS_ACCESS_KEY_ID="someone", AWS_SECRET_ACCESS_KEY="nobody-knows",
    )  # fmt: skip
    assert_learns(printed)
    assert_whole_epochs(batches(tmp_path), 6)
    fetched = [int(count) for count in re.findall(r"(\d+) objects", printed)]
    assert fetched[0] > 0
    assert fetched[1:] == [0] * 5


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_lightning_trains_and_resumes_within_an_epoch(store: Path, tmp_path: Path) -> None:
    require("lightning")
    stop, checkpoints = tmp_path / "stopped", tmp_path / "runs"
    arguments: list[Any] = [store, "--folder", checkpoints, "--epochs", 6]
    script = "lightning_example.py"
    two = [*arguments, "--devices", 2, "--steps", EPOCH + 1]
    first = run(stop, script, *two, launcher=TORCHRUN)
    rest = run(tmp_path / "rest", script, *arguments, "--resume", checkpoints / "last.ckpt")
    assert_learns(first + rest)
    steps = batches(stop, ranks=2)[: EPOCH + 1]  # Lightning asks for one batch ahead
    assert_whole_epochs([*steps, *batches(tmp_path / "rest")], 6)


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_accelerate_trains_and_resumes_within_an_epoch(store: Path, tmp_path: Path) -> None:
    require("accelerate")
    script, stop = "accelerate_example.py", tmp_path / "stopped"
    arguments = [store, "--checkpoint", tmp_path / "checkpoint"]
    first = [*arguments, "--every", 2, "--epochs", 1]
    run(stop, script, *first, launcher=TORCHRUN, ACCELERATE_USE_CPU="1")
    assert_whole_epochs(batches(stop, ranks=2), 1)
    printed = run(tmp_path / "rest", script, *arguments, "--resume", "--epochs", 6)
    assert_learns(printed)
    # The checkpoint is of the second of three steps.
    assert_whole_epochs(batches(stop, ranks=2)[:2] + batches(tmp_path / "rest"), 6)


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_the_trainer_of_transformers_resumes_within_an_epoch(store: Path, tmp_path: Path) -> None:
    require("transformers")
    runs = ["--folder", tmp_path / "runs"]
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    run(whole, "hf_trainer.py", store, *runs, "--every", 2, "--epochs", 2)
    assert_whole_epochs(batches(whole), 2)
    for later in (4, 6):
        (tmp_path / f"runs/checkpoint-{later}").rename(tmp_path / f"later-{later}")
    printed = run(rest, "hf_trainer.py", store, *runs, "--resume", "--epochs", 2)
    assert batches(rest) == batches(whole)[2:]
    assert "6 steps: loss" in printed


@pytest.mark.heavy
def test_timm_trains(store: Path, tmp_path: Path) -> None:
    require("timm", "timm")  # its torchvision does not work with a torch for CPUs
    printed = run(tmp_path, "timm_example.py", store, "--epochs", 4, "--lr", 0.003)
    assert_learns(printed)
    assert_whole_epochs(batches(tmp_path), 4)


def test_the_table_names_every_script() -> None:
    table = (EXAMPLES / "README.md").read_text()
    scripts = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    assert set(re.findall(r"\]\(([\w.]+)\)", table)) >= scripts - {"resnet.py"}
