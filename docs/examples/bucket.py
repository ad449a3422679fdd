"""Build a store in an S3 bucket, and train from it through a cache on the local disk.

Credentials are found as boto3 finds them: environment, profile, or the machine's role::

    pip install ".[workers,s3]"
    python bucket.py s3://bucket/photos s3://bucket/photos.store

For another service that speaks S3, such as MinIO, set AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import precache


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", help="folder or URL of the photos")
    parser.add_argument("store", help="URL of the store")
    parser.add_argument("--cache-dir", default="/tmp/precache", help="on a local disk")
    parser.add_argument("--cache-limit", default="10GB")
    parser.add_argument("--address", default="local", help="where to build, as in precache build")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    recipe = precache.Recipe.image(resize=64, crop=64)
    version = precache.ensure(options.photos, options.store, recipe, address=options.address)
    loader = precache.Loader(
        version,
        batch_size=8,
        device="cpu",
        output="tuple",
        cache=precache.Cache(options.cache_dir, options.cache_limit),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * 8 * 8, len(version.classes)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for epoch in range(options.epochs):
        losses = []
        for image, label in loader:
            loss = nn.functional.cross_entropy(model(image.float() / 255), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")
        print(f"{loader.stats().fetched.objects} objects fetched")
    loader.close()


if __name__ == "__main__":
    main()
