"""Kinds of labels: classes, numbers, or several classes of a sample. Pure.

The array of the labels tells the kind: (rows,) integers are class numbers, -1 for none; (rows,)
float32 are numbers, as for a regression, NaN for none; (rows, classes) uint8 has a 1 for each
class of a sample (multi-hot), and zeros for none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

CLASS_DTYPES = ("int8", "int16", "int32", "int64")
"""Stored dtypes of class numbers: the first that holds all of them is used."""

MOST_CLASSES = 1 << 16
"""Classes of multi-hot labels."""

MOST_LABEL_NBYTES = 2 << 30
"""Bytes of multi-hot labels, all of which a loader holds in memory."""


def are_classes(labels: np.ndarray) -> bool:
    """Return True for class numbers."""
    return labels.ndim == 1 and labels.dtype.kind in "iu"


def has_label(labels: np.ndarray) -> np.ndarray:
    """Return which rows have a label: (rows,) bool."""
    if labels.ndim == 2:
        return np.asarray(labels.any(axis=1))
    return np.asarray(~np.isnan(labels) if labels.dtype.kind == "f" else labels >= 0)


def no_labels(count: int, like: np.ndarray) -> np.ndarray:
    """Return the labels of rows without a label, of the kind of other labels."""
    empty = 0 if like.ndim == 2 else np.nan if like.dtype.kind == "f" else -1
    return np.full((count, *like.shape[1:]), empty, like.dtype)


def narrow(labels: np.ndarray) -> np.ndarray:
    """Convert labels to their stored dtype: for class numbers the narrowest that holds them."""
    if not are_classes(labels):
        return labels
    top = int(labels.max(initial=0))
    fitting = (dtype for dtype in CLASS_DTYPES if top <= np.iinfo(dtype).max)
    return labels.astype(next(fitting))


def kind_in_words(row_shape: Sequence[int] = (), dtype: str = "int64") -> str:
    """Return the kind of labels of which a row has this shape and dtype."""
    if row_shape:
        return f"multi-hot, {row_shape[0]:,} classes"
    return "numbers" if dtype == "float32" else "class numbers"


def label_texts(labels: np.ndarray, classes: Sequence[str]) -> list[str]:
    """Return labels as text: names of classes, numbers where there are none, empty for no label."""
    names = dict(enumerate(classes))
    if labels.dtype.kind == "f":
        return ["" if np.isnan(number) else str(number) for number in labels]
    if labels.ndim == 1:
        return [names.get(n, str(n)) if n >= 0 else "" for n in labels.tolist()]
    rows, numbers = np.nonzero(labels)
    texts = [names.get(number, str(number)) for number in numbers.tolist()]
    ends = np.searchsorted(rows, np.arange(len(labels) + 1)).tolist()
    return [", ".join(texts[start:end]) for start, end in itertools.pairwise(ends)]
