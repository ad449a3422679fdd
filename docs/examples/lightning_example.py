"""Train with Lightning from a store, and resume in the middle of an epoch.

::

    precache build photos/ photos.store --resize 64 --crop 64
    python lightning_example.py photos.store --devices 2
    python lightning_example.py photos.store --resume runs/last.ckpt

A checkpoint includes the position of the loader, so that the number of devices may change between
two runs, as long as ``--batch-size``, which is of all devices together, stays the same.
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import precache
from precache.transforms import Compose, HorizontalFlip, Normalize


class Classifier(lightning.LightningModule):
    def __init__(self, store: str, batch_size: int) -> None:
        super().__init__()
        self.version = precache.open(store)
        self.batch_size = batch_size
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 7, stride=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, len(self.version.classes)),
        )

    def train_dataloader(self) -> precache.Loader:
        # Lightning calls this in each process, once its rank is known.
        normalize = Normalize(self.version.mean["image"], self.version.std["image"])
        return precache.Loader(
            self.version,
            self.batch_size // self.trainer.world_size,
            device=self.device,
            transform=Compose([HorizontalFlip(), normalize]),
            output="tuple",
        )

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        image, label = batch
        loss = nn.functional.cross_entropy(self.net(image), label)
        self.print(f"step {self.global_step}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", help="folder or URL of a store with labels")
    parser.add_argument("--batch-size", type=int, default=8, help="of all devices together")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=-1, help="stop after so many steps in all")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--folder", default="runs", help="folder of the checkpoints")
    parser.add_argument("--resume", metavar="CHECKPOINT")
    options = parser.parse_args()

    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        max_steps=options.steps,
        devices=options.devices,
        callbacks=[ModelCheckpoint(options.folder, every_n_train_steps=1, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(options.store, options.batch_size), ckpt_path=options.resume)


if __name__ == "__main__":
    main()
