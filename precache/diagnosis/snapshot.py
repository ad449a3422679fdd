"""What a measurement changes and has to put back: random states, a loader's position, a model."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from precache.errors import UsageError
from precache.loading.loader import Loader


class Snapshot:
    """States as they were; `rewind` makes a loader give the same batches again.

    Parameters
    ----------
    objects
        With `state_dict` and `load_state_dict`: models, optimizers, schedulers.
    """

    def __init__(self, loader: Any, objects: Sequence[Any]) -> None:
        for each in objects:
            if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
                raise UsageError(
                    f"restore has {each!r}, which has no state_dict and load_state_dict; give "
                    "models, optimizers and the like"
                )
        self._loader = loader if isinstance(loader, Loader) else None
        self._position = self._loader.state_dict() if self._loader else {}
        places = (loader, getattr(loader, "sampler", None))
        found = [getattr(place, "generator", None) for place in places]
        generators = [each for each in found if isinstance(each, torch.Generator)]
        self._generators = [(each, each.get_state()) for each in generators]
        self._objects = [(each, copy.deepcopy(each.state_dict())) for each in objects]
        self._python = random.getstate()
        # What code without a generator of its own draws from, and so what is to be put back.
        self._numpy = np.random.get_state()  # noqa: NPY002 - what users draw from
        self._torch = torch.get_rng_state()
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
        self._cuda = torch.cuda.get_rng_state_all() if on_cuda else []

    def rewind(self) -> None:
        """Random states and the loader's position."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002  # as above
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        for generator, state in self._generators:
            generator.set_state(state)
        if self._loader is not None:
            self._loader.load_state_dict(self._position)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.rewind()
        for each, state in self._objects:
            each.load_state_dict(state)
