"""Train a ResNet as on ImageNet, in one process or under torchrun, and resume within an epoch.

The photos are stored whole, and cropped at random as they are read::

    precache build train/ train.store --max-size 500
    precache build val/ val.store --resize 256 --crop 224 --classes train.store
    torchrun --nproc-per-node 8 imagenet.py train.store --val val.store

To continue a training that was stopped, add ``--resume``. The number of processes may change,
because ``--batch-size`` counts the samples of all of them. Needs resnet.py beside this file.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import precache
from precache.transforms import Compose, HorizontalFlip, Normalize, RandomResizedCrop
from resnet import DEPTHS, resnet


def normalize(version: precache.Version) -> Normalize:
    return Normalize(version.mean["image"], version.std["image"], channels_last=True)


def augment(version: precache.Version, crop: int) -> Compose:
    return Compose([RandomResizedCrop(crop), HorizontalFlip(), normalize(version)])


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, image: Tensor, label: Tensor
) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=image.is_cuda):
        output = model(image)
    loss = nn.functional.cross_entropy(output.float(), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def mean(value: Tensor) -> float:
    """Return the mean over all processes."""
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


@torch.no_grad()
def accuracy(model: nn.Module, loader: precache.Loader) -> float:
    """Return the share of right samples over all processes, each counted once."""
    model.eval()
    counts = torch.zeros(2, device=loader.device)  # right ones, and all
    for batch in loader:
        right = model(batch["image"]).argmax(1) == batch["label"]
        own = ~batch["repeated"] if "repeated" in batch else torch.ones_like(right)
        counts += torch.stack([(right & own).sum(), own.sum()])
    model.train()
    if dist.is_initialized():
        dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def save(path: Path, parts: dict[str, Any]) -> None:
    """Write a checkpoint; if this is killed, the previous one stays."""
    new = path.with_suffix(".new")
    torch.save({name: part.state_dict() for name, part in parts.items()}, new)
    new.replace(path)


def train(options: argparse.Namespace) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    first_rank = not dist.is_initialized() or dist.get_rank() == 0
    version = precache.open(options.store)
    loader = precache.Loader(
        version,
        options.batch_size // world,
        seed=options.seed,
        drop_last=True,
        transform=augment(version, options.crop),
        output="tuple",
    )
    torch.manual_seed(options.seed)
    net = resnet(options.depth, len(version.classes), options.width)
    net = net.to(loader.device, memory_format=torch.channels_last)
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.SGD(net.parameters(), options.lr, momentum=0.9, weight_decay=5e-5)
    total = options.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1, step / total))
    )

    parts = {"net": net, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    if options.resume and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=loader.device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    for epoch in range(loader.state_dict()["epoch"], options.epochs):
        loader.set_epoch(epoch)
        for batch, (image, label) in enumerate(loader, loader.state_dict()["batch"] + 1):
            loss = train_step(model, optimizer, image, label)
            schedule.step()
            stop = schedule.last_epoch == options.steps
            if batch % options.every == 0 or batch == len(loader) or stop:
                average = mean(loss)
                if first_rank:
                    print(f"epoch {epoch}, batch {batch} of {len(loader)}: loss {average:.4f}")
                    with options.losses.open("a") as log:
                        log.write(json.dumps([epoch, batch, average]) + "\n")
                    save(options.checkpoint, parts)
            if stop:
                return
        if options.val:
            val = precache.open(options.val)
            with precache.Loader(
                val,
                options.batch_size // world,
                shuffle=False,
                transform=normalize(version),
            ) as batches:
                top1 = accuracy(model, batches)
            if first_rank:
                print(f"epoch {epoch}: accuracy {top1:.1%}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", help="folder or URL of a store with labels")
    parser.add_argument("--val", metavar="STORE", help="store to validate with after each epoch")
    parser.add_argument("--depth", type=int, choices=DEPTHS, default=50)
    parser.add_argument("--width", type=int, default=64, help="channels of the first layers")
    parser.add_argument("--crop", type=int, default=176, help="pixels that the network takes")
    parser.add_argument("--batch-size", type=int, default=256, help="of all processes together")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--steps", type=int, help="stop after so many steps in all")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--losses", type=Path, default=Path("losses.jsonl"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:  # torchrun sets it
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(options)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
