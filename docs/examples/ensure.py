"""Build the store that a training needs within the training script, and train from it.

The first run decodes the photos; every later one opens the store at once. Under torchrun one
process builds, and the others wait and then open the same version::

    python ensure.py photos/ photos.store
    torchrun --nproc-per-node 8 ensure.py photos/ photos.store

If photos are added or the recipe is edited, the next run builds what changed and nothing else. A
store in an S3 bucket is read through a cache on the local disk::

    pip install ".[workers,s3]"
    python ensure.py s3://bucket/photos s3://bucket/photos.store --cache /tmp/precache 10GB

Credentials are found as boto3 finds them: environment, profile, or the machine's role. For another
service that speaks S3, such as MinIO, set AWS_ENDPOINT_URL.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import precache


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", help="folder or URL of images, one sub-folder for each class")
    parser.add_argument("store", help="folder or URL of the store; it is created if it is missing")
    parser.add_argument("--cache", nargs=2, metavar=("FOLDER", "LIMIT"), help="on a local disk")
    parser.add_argument("--address", default="local", help="where to build, as in precache build")
    parser.add_argument("--size", type=int, default=64, help="pixels of a side")
    parser.add_argument("--batch-size", type=int, default=8, help="of each process")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    options = parser.parse_args()
    if "RANK" in os.environ:  # torchrun sets it
        dist.init_process_group("gloo")

    recipe = precache.Recipe.image(resize=options.size, crop=options.size)
    version = precache.ensure(options.photos, options.store, recipe, address=options.address)
    cache = precache.Cache(*options.cache) if options.cache else None

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, len(version.classes)),
    )
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9)
    with precache.Loader(
        version, options.batch_size, device="cpu", output="tuple", cache=cache
    ) as loader:
        for epoch in range(options.epochs):
            losses = []
            for image, label in loader:
                loss = nn.functional.cross_entropy(model(image.float() / 255), label)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            if loader.rank == 0:
                print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")
                if cache:
                    print(f"{loader.stats().fetched.objects} objects fetched")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
