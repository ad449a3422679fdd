"""Train a model of timm from a store: timm's model, loss, Mixup, optimizer and schedule.

::

    precache build photos/ photos.store --resize 256 --crop 224
    python timm_example.py photos.store --model resnet50 --batch-size 256 --epochs 90

timm's own ``train.py`` can be fed as well. Replace its call of ``create_loader`` by::

    loader_train = precache.Loader(
        "photos.store", args.batch_size, transform=Normalize(mean, std), output="tuple"
    )
    loader_train.sampler = None  # train.py asks it for set_epoch; a Loader counts epochs itself

with mean and std in stored units (timm's times 255), and run it with ``--no-prefetcher``, so that
it applies its Mixup to the batches.
"""

import argparse

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

import precache
from precache.transforms import Compose, HorizontalFlip, Normalize


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store", help="folder or URL of a store with labels")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch-size", type=int, default=8, help="an even number, for Mixup")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()

    version = precache.open(options.store)
    classes = len(version.classes)
    torch.manual_seed(0)
    model = timm.create_model(options.model, num_classes=classes)
    # timm's mean and std are of values from 0 to 1, those of Normalize of stored values.
    mean, std = ([255 * value for value in model.pretrained_cfg[name]] for name in ("mean", "std"))
    loader = precache.Loader(
        version,
        options.batch_size,
        drop_last=True,
        transform=Compose([HorizontalFlip(), Normalize(mean, std)]),
        output="tuple",
    )
    model = model.to(loader.device)
    mixup = Mixup(mixup_alpha=0.2, num_classes=classes)
    loss_function = SoftTargetCrossEntropy()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=options.lr, weight_decay=0.05)
    schedule, epochs = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=options.epochs, updates_per_epoch=len(loader)
    )
    for epoch in range(epochs):
        losses = []
        for batch in loader:
            image, label = mixup(*batch)
            loss = loss_function(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        schedule.step(epoch + 1)
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")


if __name__ == "__main__":
    main()
