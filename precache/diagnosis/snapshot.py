"""Save and restore what a measurement changes: random states, a loader's position, a model."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from precache.errors import UsageError
from precache.loading.loader import Loader
from precache.loading.mixing import Mixture


class Snapshot:
    """Saved states; `rewind` makes a loader yield the same batches again.

    Parameters
    ----------
    objects
        Objects with `state_dict` and `load_state_dict`: models, optimizers, schedulers.
    """

    def __init__(self, loader: Any, objects: Sequence[Any]) -> None:
        for item in objects:
            if not hasattr(item, "state_dict") or not hasattr(item, "load_state_dict"):
                raise UsageError(
                    f"restore has {item!r}, which has no state_dict and load_state_dict; give "
                    "models, optimizers and the like"
                )
        self._loader = loader if isinstance(loader, Loader | Mixture) else None
        self._position = self._loader.state_dict() if self._loader else {}
        batch_sampler = getattr(loader, "batch_sampler", None)
        samplers = [getattr(owner, "sampler", None) for owner in (loader, batch_sampler)]
        owners = (loader, batch_sampler, *samplers)
        candidates = [getattr(owner, "generator", None) for owner in owners]
        generators = [one for one in candidates if isinstance(one, torch.Generator)]
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._objects = [(item, copy.deepcopy(item.state_dict())) for item in objects]
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002  # users draw from it
        self._torch = torch.get_rng_state()
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
        self._cuda = torch.cuda.get_rng_state_all() if on_cuda else []

    def rewind(self) -> None:
        """Restore random states and the loader's position."""
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
        for item, state in self._objects:
            item.load_state_dict(state)
