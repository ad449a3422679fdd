"""Run a script of a user, and record the labels of the batches that its loops receive.

``python tests/support/recorded.py FOLDER SCRIPT [ARGUMENT ...]`` appends a line for each batch to
``FOLDER/<rank>.jsonl``.
"""

import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import precache

_iterate = precache.Loader.__iter__


def _recorded(loader: precache.Loader) -> Iterator[Any]:
    for batch in _iterate(loader):
        label = batch.get("label", batch.get("labels")) if isinstance(batch, dict) else batch[1]
        with Path(folder, f"{os.environ.get('RANK', '0')}.jsonl").open("a") as lines:
            lines.write(json.dumps(label.tolist()) + "\n")
        yield batch


if __name__ == "__main__":
    folder, *sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    precache.Loader.__iter__ = _recorded  # type: ignore[method-assign]
    runpy.run_path(sys.argv[0], run_name="__main__")
