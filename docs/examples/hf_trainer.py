"""Train a model of Transformers with the Hugging Face `Trainer`, fed by a store.

::

    precache build photos/ photos.store --resize 224 --crop 224
    python hf_trainer.py photos.store
    torchrun --nproc-per-node 8 hf_trainer.py photos.store --resume

`Trainer` builds a `DataLoader` from a dataset; a subclass returns a `precache.Loader` in its place.
To resume in the middle of an epoch, the loader starts at the first batch that is left.
"""

import argparse
from typing import Any

from torch import Tensor
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import precache
from precache.transforms import Compose, HorizontalFlip, Normalize


def as_model_input(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"pixel_values": batch["image"], "labels": batch["label"]}


class StoreTrainer(Trainer):
    """A `Trainer` that reads batches from a version of a store."""

    def __init__(self, *, version: precache.Version, **settings: Any) -> None:
        super().__init__(**settings, callbacks=[Resume()])
        self.version = version

    def get_train_dataloader(self) -> precache.Loader:
        normalize = Normalize(self.version.mean["image"], self.version.std["image"])
        return precache.Loader(
            self.version,
            self.args.train_batch_size,
            seed=self.args.seed,
            device=self.args.device,
            transform=Compose([HorizontalFlip(), normalize, as_model_input]),
        )


class Resume(TrainerCallback):
    """Starts the loader where the trainer stands. `ignore_data_skip` leaves this to us."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        loader: precache.Loader = others["train_dataloader"]
        batches = state.global_step * args.gradient_accumulation_steps
        loader.seek(*divmod(batches, len(loader)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", help="folder or URL of a store with labels")
    parser.add_argument("--batch-size", type=int, default=8, help="of each process")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=500, help="steps between two checkpoints")
    parser.add_argument("--folder", default="runs", help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    options = parser.parse_args()

    version = precache.open(options.store)
    config = ResNetConfig(
        num_labels=len(version.classes), embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
        layer_type="basic",
    )  # fmt: skip
    trainer = StoreTrainer(
        version=version,
        model=ResNetForImageClassification(config),
        args=TrainingArguments(
            options.folder,
            per_device_train_batch_size=options.batch_size,
            num_train_epochs=options.epochs,
            learning_rate=1e-3,
            logging_steps=1,
            save_steps=options.every,
            ignore_data_skip=True,
            report_to=[],
        ),
    )
    result = trainer.train(resume_from_checkpoint=options.resume)
    print(f"{result.global_step} steps: loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main()
