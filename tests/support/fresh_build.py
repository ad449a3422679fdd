"""What a build makes of a source in an empty store, as plain values.

``python tests/support/fresh_build.py`` builds with whatever precache is importable, so that a test
can have another checkout of it build: a request a line comes on standard input, as JSON.
"""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

import precache


def content(store: Any) -> dict[str, Any]:
    """Return all that the current version of a store says of its samples, by key.

    ``rows`` has a dict of rows for each variant of a field, ``labels`` a name, number or None for
    each sample that was not removed, ``failed`` and ``removed`` the reasons of holes.
    """
    version = precache.open(store)
    keys = list(version.keys)
    holes = {keys[row]: str(hole) for row, (_, hole) in version.holes.items()}
    removed = {key: reason for key, reason in holes.items() if "removed" in reason}
    variants = {name: field.variants for name, field in version.fields.items()}
    rows: dict[tuple[str, int], dict[str, np.ndarray]] = {
        (name, variant): {} for name, count in variants.items() for variant in range(count)
    }
    labels: dict[str, Any] = {}
    read: list[str] = []
    batch = min(7, int(version.valid.sum()))
    with precache.Loader(store, batch, shuffle=False, device="cpu") as loader:
        for epoch in range(max(variants.values())):
            loader.set_epoch(epoch)
            for batch in loader:
                names = loader.keys(batch["row"])
                read += names
                for name in variants.keys() & batch.keys():
                    if epoch < variants[name]:
                        pairs = zip(names, batch[name].numpy().copy(), strict=True)
                        rows[name, epoch].update(pairs)
                labels.update(zip(names, batch["label"].tolist(), strict=True))
    assert len(read) == len(set(read)) * max(variants.values()), "a key is read twice"
    stored = dict(zip(keys, version.labels.tolist(), strict=True))
    assert labels.items() <= stored.items()
    assert set(keys) == labels.keys() | holes.keys()
    assert len(keys) == len(set(keys)), "a key has two rows"
    kept = {key: label for key, label in stored.items() if key not in removed}
    if version.classes:
        kept = {key: version.classes[n] if n >= 0 else None for key, n in kept.items()}
    else:
        kept = {key: label if label >= 0 else None for key, label in kept.items()}
    return {
        "rows": rows,
        "labels": kept,
        "classes": tuple(version.classes),
        "failed": {key: reason for key, reason in holes.items() if key not in removed},
        "removed": removed,
        "mean": version.mean,
        "std": version.std,
    }


def build_and_read(
    source: str, store: str, recipe: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of a store that is built anew in this process."""
    shutil.rmtree(store, ignore_errors=True)
    made = precache.Recipe.from_dict(recipe)
    precache.build(source, store, made, address="serial", **options)
    return content(store)


def find_code(folder: str) -> None:
    """Have modules below a folder importable, as their text is now."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, folder)


def _serve() -> None:
    import torch  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        answer = Path(request.pop("answer"))
        if (child := os.fork()) == 0:
            os.dup2(2, 1)
            find_code(request.pop("code"))
            result: Any
            try:
                result = build_and_read(**request)
            except BaseException as error:  # told to the test
                result = repr(error)
            answer.write_bytes(pickle.dumps(result))
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    _serve()
