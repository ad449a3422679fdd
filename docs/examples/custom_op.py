"""Cache the result of a function of your own: here the histogram of each photo is equalized.

The function lives in an importable module, this one, and custom_op.toml names it. The command line
and Python build the same version, so that the second one finds it complete::

    precache build photos/ photos.store --recipe custom_op.toml
    python custom_op.py photos/ photos.store

If the function is edited, the next build computes its rows again.
"""

import argparse
from pathlib import Path

import numpy as np

import precache


def equalize(image: np.ndarray, strength: float = 1.0) -> np.ndarray:
    """Spread the values of an image over the whole range.

    Parameters
    ----------
    image
        (H, W, C) uint8, as all ops of a field that begins with ``decode`` take and return it.
    strength
        From 0 for the image as it is to 1 for a flat histogram.
    """
    counts = np.bincount(image.ravel(), minlength=256).cumsum()
    flat = 255 * counts / counts[-1]
    table = strength * flat + (1 - strength) * np.arange(256)
    return table.round().astype(np.uint8)[image]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", help="folder of images")
    parser.add_argument("store", help="folder of the store; it is created if it is missing")
    parser.add_argument("--address", default="local", help="where to build, as in precache build")
    options = parser.parse_args()

    recipe = Path(__file__).with_suffix(".toml")
    result = precache.build(options.photos, options.store, recipe, address=options.address)
    print(result)
    with precache.Loader(options.store, batch_size=8, device="cpu") as loader:
        for batch in loader:
            image = batch["image"]  # (N, 3, 64, 64) uint8
            print(f"{len(image)} rows, values from {image.min()} to {image.max()}")


if __name__ == "__main__":
    main()
