"""`Loader` and `CachedDataset` within Lightning, Accelerate and torchdata, as users have them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import precache
from tests.conftest import BuiltStore
from tests.support.building import environment

LENGTH = 10
"""Steps of an epoch: 73 rows, 8 a step."""

PREFACE = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
import precache
store, out, resume = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
world = int(os.environ.get("TEST_WORLD", "1"))
seen = []

class Net(torch.nn.Linear):
    def forward(self, batch):
        seen.append(batch["row"].tolist())
        return super().forward(batch["image"].float().mean((2, 3)) / 255).sum()

def say(rank):
    (out / f"{rank}.json").write_text(json.dumps(seen))
"""

LIGHTNING = """
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net(3, 3)
    def training_step(self, batch, number):
        return self.net(batch)
    def validation_step(self, batch, number):
        assert len(batch["row"]) > 0
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
    def train_dataloader(self):
        return precache.Loader(store, 8 // world, device="cpu")
    def val_dataloader(self):
        return precache.Loader(store, 8 // world, device="cpu", shuffle=False)

def fit(model, *loaders):
    keep = ModelCheckpoint(out, "{step}", every_n_train_steps=5, save_top_k=-1)
    L.Trainer(
        accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", logger=False,
        enable_progress_bar=False, max_epochs=2, callbacks=[keep], default_root_dir=out,
    ).fit(model, *loaders, ckpt_path=resume[0] if resume else None)

if "early" in os.environ:
    early = precache.Loader(store, 4, device="cpu")
    fit(Module(), early)
fit(Module())
say(dist.get_rank() if world > 1 else 0)
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
net = Net(3, 3)
loader = precache.Loader(store, 8 // accelerator.num_processes, device="cpu")
optimizer = torch.optim.SGD(net.parameters(), 0.1)
net, optimizer, prepared = accelerator.prepare(net, optimizer, loader)
assert prepared is loader
accelerator.register_for_checkpointing(loader)
if resume:
    accelerator.load_state(resume[0])
for epoch in range(loader.state_dict()["epoch"], 2):
    loader.set_epoch(epoch)
    for batch in loader:
        accelerator.backward(net(batch))
        optimizer.step()
        optimizer.zero_grad()
        if len(seen) in (3, 10):
            accelerator.save_state(out / f"{len(seen)}")
say(accelerator.process_index)
net, optimizer = accelerator.free_memory(net, optimizer)  # DDP outlives its group badly: abort
accelerator.end_training()
"""


def _run(
    code: str, world: int, launcher: list[str], *arguments: object, **more: str
) -> subprocess.CompletedProcess[str]:
    script = Path(str(arguments[1])) / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text(PREFACE + code)
    return subprocess.run(
        [sys.executable, *launcher, str(script), *map(str, arguments)],
        env=environment(TEST_WORLD=str(world), OMP_NUM_THREADS="1", **more),
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def _steps(done: subprocess.CompletedProcess[str], folder: Path, world: int) -> list[list[int]]:
    """Rows of each step, of all ranks together."""
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return [sorted(row for part in parts for row in part) for parts in zip(*ranks, strict=True)]


@pytest.fixture
def epochs(tile_stores: dict[str, BuiltStore]) -> list[list[int]]:
    """Rows of each step of two epochs that one rank reads."""
    with precache.Loader(tile_stores["raw"].path, 8, device="cpu") as loader:
        return [sorted(batch["row"].tolist()) for _ in range(2) for batch in loader]


def _needs(name: str) -> Any:
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"needs {name}: pip install '.[frameworks]'")


def _same(found: list[list[int]], expected: list[list[int]]) -> bool:
    """Whether steps are the same; two ranks fill up the last one of an epoch."""
    return len(found) == len(expected) and all(
        set(step) == set(other) or (set(other) <= set(step) and len(other) < 8)
        for step, other in zip(found, expected, strict=True)
    )


@pytest.mark.heavy
@_needs("lightning")
def test_lightning_trains_saves_and_resumes_with_another_number_of_ranks(
    tile_stores: dict[str, BuiltStore], epochs: list[list[int]], tmp_path: Path
) -> None:
    store = tile_stores["raw"].path
    two = tmp_path / "two"
    assert _same(_steps(_run(LIGHTNING, 2, [], store, two), two, 2), epochs)
    for step in (5, LENGTH):
        one = tmp_path / str(step)
        done = _run(LIGHTNING, 1, [], store, one, two / f"step={step}.ckpt")
        assert _same(_steps(done, one, 1), epochs[step:])


@pytest.mark.heavy
@_needs("lightning")
def test_a_loader_that_lightning_was_too_late_for_is_refused(
    tile_stores: dict[str, BuiltStore], tmp_path: Path
) -> None:
    done = _run(LIGHTNING, 2, [], tile_stores["raw"].path, tmp_path / "early", early="1")
    assert done.returncode != 0
    # Of rank 0, which iterates it, or of the rank that has no RANK yet when it makes it.
    assert "once torch.distributed is initialised" in done.stderr


@pytest.mark.heavy
@_needs("accelerate")
def test_accelerate_leaves_a_loader_alone_and_saves_its_state(
    tile_stores: dict[str, BuiltStore], epochs: list[list[int]], tmp_path: Path
) -> None:
    store = tile_stores["raw"].path
    two = tmp_path / "two"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert _same(_steps(_run(ACCELERATE, 2, torchrun, store, two), two, 2), epochs)
    for step in (3, LENGTH):
        one = tmp_path / str(step)
        done = _run(ACCELERATE, 1, [], store, one, two / str(step))
        assert _same(_steps(done, one, 1), epochs[step:])


@_needs("torchdata")
# torchdata 0.11 and torch 2.13.
@pytest.mark.filterwarnings("ignore:.*set_vital.*")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_dataloader_resumes_in_the_middle(
    workers: int, tile_stores: dict[str, BuiltStore]
) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = precache.CachedDataset(tile_stores["image"].path)

    def loader() -> Any:
        order = torch.Generator().manual_seed(1)
        return StatefulDataLoader(
            dataset, 8, shuffle=True, num_workers=workers, collate_fn=dataset.collate,
            generator=order,
        )  # fmt: skip

    whole = loader()
    rows = []
    for number, batch in enumerate(whole):
        rows.append(batch["row"].tolist())
        if number == 3:
            state = whole.state_dict()
    assert len(rows) == LENGTH
    resumed = loader()
    resumed.load_state_dict(state)
    assert [batch["row"].tolist() for batch in resumed] == rows[4:]
