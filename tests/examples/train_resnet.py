"""Train a ResNet from a store, in one process or in several, and go on where it was stopped.

::

    python -m tests.examples.train_resnet photos.store --checkpoint run.pt
    torchrun --nproc-per-node 8 -m tests.examples.train_resnet photos.store --checkpoint run.pt

The same command, run again with ``--resume``, goes on from the last checkpoint, with the same
global batch and any number of processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import precache
from precache.transforms import Compose, HorizontalFlip, Normalize
from tests.examples.resnet import DEPTHS, resnet


def recipe(version: precache.Version) -> Compose:
    """What is done to each batch on the device: uint8 -> float32, mirrored at random."""
    return Compose([HorizontalFlip(), Normalize(version.mean["image"], version.std["image"])])


def losses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
) -> Iterator[Tensor]:
    """One step for each batch of images and labels; yields its loss when it is made."""
    for image, label in batches:
        cuda = image.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            output = model(image.contiguous(memory_format=torch.channels_last) if cuda else image)
            loss = nn.functional.cross_entropy(output.float(), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def _save(path: Path, parts: dict[str, Any]) -> None:
    """Replace the checkpoint at once: one that is killed meanwhile leaves the old one."""
    beside = path.with_suffix(".new")
    torch.save({name: part.state_dict() for name, part in parts.items()}, beside)
    beside.replace(path)


def _load(path: Path, parts: dict[str, Any], device: torch.device) -> None:
    saved = torch.load(path, map_location=device, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])


def _mean(loss: Tensor) -> float:
    """Over all processes."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def train(options: argparse.Namespace) -> None:
    """Train as the command line says; to be run in every process."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    chief = not dist.is_initialized() or dist.get_rank() == 0
    version = precache.open(options.store)
    torch.manual_seed(options.seed)
    net = resnet(options.depth, len(version.classes), options.width)
    with precache.Loader(
        options.store, options.batch_size // world, seed=options.seed, drop_last=True,
        transform=recipe(version), output="tuple",
    ) as loader:  # fmt: skip
        net = net.to(loader.device, memory_format=torch.channels_last)
        model = DistributedDataParallel(net) if dist.is_initialized() else net
        optimizer = torch.optim.SGD(net.parameters(), options.lr, momentum=0.9, weight_decay=5e-5)
        total = options.epochs * len(loader)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1, step / total))
        )
        parts = {"net": net, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        if options.resume and options.checkpoint.exists():
            _load(options.checkpoint, parts, loader.device)
        model.train()
        for epoch in range(loader.state_dict()["epoch"], options.epochs):
            loader.set_epoch(epoch)
            first = loader.state_dict()["batch"]
            for batch, loss in enumerate(losses(model, optimizer, loader), first):
                schedule.step()
                if (batch + 1) % options.every == 0 or batch + 1 == len(loader):
                    mean = _mean(loss)
                    if chief:
                        with options.losses.open("a") as log:
                            log.write(json.dumps([epoch, batch, mean]) + "\n")
                        _save(options.checkpoint, parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", help="folder or URL of a store with labels")
    parser.add_argument("--depth", type=int, choices=DEPTHS, default=50)
    parser.add_argument("--width", type=int, default=64, help="channels of the first layers")
    parser.add_argument("--batch-size", type=int, default=256, help="of all processes together")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--losses", type=Path, default=Path("losses.jsonl"), help="a line each")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(options)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
