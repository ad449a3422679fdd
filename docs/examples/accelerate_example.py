"""Train with Hugging Face Accelerate from a store, and resume in the middle of an epoch.

::

    precache build photos/ photos.store --resize 64 --crop 64
    accelerate launch --num_processes 2 accelerate_example.py photos.store
    accelerate launch --num_processes 4 accelerate_example.py photos.store --resume

``prepare`` leaves a `precache.Loader` as it is: its batches are already on the device, and each
process already reads its own part.
"""

import argparse
from pathlib import Path

from accelerate import Accelerator
from torch import nn, optim

import precache
from precache.transforms import Compose, HorizontalFlip, Normalize


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", help="folder or URL of a store with labels")
    parser.add_argument("--batch-size", type=int, default=8, help="of all processes together")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=100, help="batches between two checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    accelerator = Accelerator()
    version = precache.open(options.store)
    normalize = Normalize(version.mean["image"], version.std["image"])
    loader = precache.Loader(
        version,
        options.batch_size // accelerator.num_processes,
        device=accelerator.device,
        transform=Compose([HorizontalFlip(), normalize]),
        output="tuple",
    )
    net = nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, len(version.classes)),
    )
    optimizer = optim.SGD(net.parameters(), 0.01, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    accelerator.register_for_checkpointing(loader)
    if options.resume:
        accelerator.load_state(options.checkpoint)

    for epoch in range(loader.state_dict()["epoch"], options.epochs):
        loader.set_epoch(epoch)
        for batch, (image, label) in enumerate(loader, loader.state_dict()["batch"] + 1):
            loss = nn.functional.cross_entropy(model(image), label)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"epoch {epoch}, batch {batch}: loss {loss.item():.4f}")
            if batch % options.every == 0:
                accelerator.save_state(options.checkpoint)
    accelerator.end_training()


if __name__ == "__main__":
    main()
