"""Decode once, off the training node; train from memory-mapped tensors.

Importing this package loads neither torch nor Ray nor a decoder; each name is loaded on first use.
"""

import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# The stub is the only list of names. Source: Scientific Python's SPEC 1, lazy loading.
_HOME_OF = {
    name: home
    for home, name in re.findall(
        r"^from (\S+) import (\w+) as \w+$",
        Path(__file__).with_suffix(".pyi").read_text("utf-8"),
        re.MULTILINE,
    )
}
__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'precache' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
