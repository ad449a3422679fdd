"""Save and restore what a measurement changes: random states, a loader's position, a model."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from precache.errors import UsageError
from precache.loading.loader import Loader
from precache.loading.mixing import Mixture


@contextlib.contextmanager
def restored(loader: Any, objects: Sequence[Any]) -> Iterator[None]:
    """Save states, and restore them after the block, so that a loader yields the same batches.

    Parameters
    ----------
    objects
        Objects with `state_dict` and `load_state_dict`: models, optimizers, schedulers.
    """
    for item in objects:
        if not hasattr(item, "state_dict") or not hasattr(item, "load_state_dict"):
            raise UsageError(
                f"restore has {item!r}, which has no state_dict and load_state_dict; give "
                "models, optimizers and the like"
            )
    placed = [loader] if isinstance(loader, Loader | Mixture) else []
    states = [(item, copy.deepcopy(item.state_dict())) for item in (*placed, *objects)]
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = [getattr(owner, "sampler", None) for owner in (loader, batch_sampler)]
    owners = (loader, batch_sampler, *samplers)
    candidates = [getattr(owner, "generator", None) for owner in owners]
    generators = [(one, one.get_state()) for one in candidates if isinstance(one, torch.Generator)]
    of_python = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002  # users draw from it
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
    devices = range(torch.cuda.device_count() if on_cuda else 0)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002  # as above
        for generator, state in generators:
            generator.set_state(state)
        for item, state in states:
            item.load_state_dict(state)
