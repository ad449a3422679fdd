"""``python -m tests.demo.pictures``: make the screenshots of docs/pictures.

It builds a store of the demo's photographs, diagnoses a `DataLoader` over them, and has Debian's
Chromium show the pages that `precache` writes.
"""

import base64
import contextlib
import io
import tempfile
from pathlib import Path

import torch
from PIL import Image

import precache
from tests.demo.photos import PhotoSet, make_photos
from tests.demo.training import (
    CROP,
    RESIZE,
    Batch,
    JpegDataset,
    jpeg_batches,
    make_net,
    train_step,
)
from tests.support.browser import Tab, chromium

PICTURES = Path(__file__).parents[2] / "docs/pictures"
WIDTH, HEIGHT, LEAST_HEIGHT, SCALE = 900, 988, 600, 1.5


def main() -> None:
    """Make all pictures anew."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="precache-pictures-") as name:
        folder = Path(name)
        with contextlib.chdir(folder):  # paths of pages are short
            _write_pages(make_photos(Path("photos"), 800))
        with chromium(folder / "profile") as tab:
            for page in sorted(folder.glob("*.html")):
                _screenshot(tab, page, PICTURES / f"{page.stem}.webp")


def _write_pages(photos: PhotoSet) -> None:
    """Write the pages of a build, of its store, and of a loop over the same photographs."""
    store = "photos.store"
    recipe = precache.Recipe.image(resize=RESIZE, crop=CROP)
    precache.build(photos.folder, store, recipe, report="report.html")
    precache.view(store, photos.folder, find="coffee", rows=2).write("view.html")

    keys = [key for key in photos.keys if key not in photos.broken]
    batches = jpeg_batches(JpegDataset(photos.folder, keys, photos.classes), 64, 0, 0)
    net = make_net(len(photos.classes))
    optimizer = torch.optim.AdamW(net.parameters())

    def step(batch: Batch) -> None:
        train_step(net, optimizer, *batch)

    precache.diagnose(batches(0), step).html("diagnosis.html")


def _screenshot(tab: Tab, page: Path, picture: Path) -> None:
    """Save the upper part of a page as seen in a light window, cut between two of its parts."""
    tab.call("Emulation.setScrollbarsHidden", hidden=True)
    tab.open(page, WIDTH, still=True)
    tab.run("scrollTo(0, document.body.scrollHeight)")  # pages lay out what is seen
    tab.until("[...document.images].every(image => image.complete)")
    tops = tab.run(
        "[...document.querySelectorAll('h2')].map(e => e.getBoundingClientRect().top + scrollY)"
    )
    tab.run("scrollTo(0, 0)")
    height = max((top for top in tops if LEAST_HEIGHT < top < HEIGHT), default=HEIGHT)
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": SCALE}
    data = tab.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    with Image.open(io.BytesIO(base64.b64decode(data["data"]))) as image:
        image.convert("RGB").save(picture, quality=80, method=6)


if __name__ == "__main__":
    main()
