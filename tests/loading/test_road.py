"""The road from `Loader(...)` to copied bytes: functions that are given an option, or rows.

``python -m pytest -s tests/loading/test_road.py`` prints them.
"""

import dataclasses
import itertools
import sys
import threading
from collections import deque
from types import FrameType
from typing import Any

import numpy as np

from precache import Reading
from precache.loading.options import LoaderOptions
from tests.conftest import BuiltStore
from tests.support.loaders import opened

OPTIONS: dict[str, Any] = {
    "batch_size": 17,
    "seed": 4711,
    "fields": ["image"],
    "reading": Reading(num_threads=1),
}

Road = dict[tuple[str, str], set[str]]
"""Module and function -> its parameters that hold what is followed; in the order of first calls."""


def _has_option(value: Any) -> bool:
    if isinstance(value, LoaderOptions | Reading) or value is OPTIONS["fields"]:
        return True
    if isinstance(value, tuple | list | dict):
        return any(map(_has_option, value.values() if isinstance(value, dict) else value))
    return type(value) is int and value in (OPTIONS["batch_size"], OPTIONS["seed"])


def _has_rows(value: Any, rows: np.ndarray) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype == np.int64 and np.array_equal(value, rows)
    if dataclasses.is_dataclass(value):
        value = [getattr(value, "rows", None)]
    return isinstance(value, tuple | list | deque) and any(_has_rows(v, rows) for v in value)


def test_an_option_and_a_row_pass_few_functions_on_their_way_to_bytes(
    stores: dict[str, BuiltStore],
) -> None:
    roads: dict[str, Road] = {"an option": {}, "rows of a batch": {}}
    copied = threading.Event()

    def note(frame: FrameType, event: str, _: object) -> None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if event != "call" or copied.is_set() or code.co_name.startswith("<"):
            return
        if not module.startswith("precache."):
            return
        if code.co_name == "copy_pieces":
            copied.set()
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *values, **options
        for name in {*code.co_varnames[:count]} - {"self"}:
            value = frame.f_locals.get(name)
            found = _has_option(value), _has_rows(value, rows)
            for road in itertools.compress(roads.values(), found):
                road.setdefault((module, code.co_qualname), set()).add(name)

    with opened(stores["raw"], drop_last=True, **OPTIONS) as loader:
        [rows] = loader.order.epoch(0)
        list(loader)  # imports what is imported at its first use
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with opened(stores["raw"], drop_last=True, **OPTIONS) as loader:
            list(loader)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert copied.is_set()
    for what, road in roads.items():
        modules = [module for module, _ in road]
        back = [m for n, m in enumerate(modules) if m in modules[:n] and m != modules[n - 1]]
        numbers = len(road), len({*modules}), len(back), len(set().union(*road.values()))
        print(f"\n{what}: %d functions, %d modules, %d returns, %d names" % numbers)
        for (module, function), names in road.items():
            print(f"    {module}.{function} ({', '.join(sorted(names))})")
        assert all(0 < n <= most for n, most in zip(numbers, (15, 8, 5, 20), strict=True))
