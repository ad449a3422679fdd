"""Decode once, off the training node; train from memory-mapped tensors.

Importing this package loads neither torch nor Ray nor a decoder; each name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precache.dataset import CachedDataset
    from precache.diagnosis import Diagnosis, diagnose
    from precache.difference import diff
    from precache.ensured import ensure
    from precache.errors import (
        BuildError,
        DamageError,
        PipelineError,
        PrecacheError,
        SourceError,
        StorageError,
        StoreError,
        UsageError,
    )
    from precache.garbage import gc
    from precache.inventory import use, versions
    from precache.jobs import build, doctor, plan, submit
    from precache.loader import Loader
    from precache.metering import Meter, meter
    from precache.mixture import Mixture, mix
    from precache.operations import (
        CenterCrop,
        Decode,
        Function,
        HorizontalFlip,
        RandomResizedCrop,
        Resize,
        ToDType,
    )
    from precache.pipeline import Field, Pipeline
    from precache.refreshed import refresh, submit_refresh
    from precache.simulation import Simulation, simulate
    from precache.stalls import StallReport
    from precache.store import open_version as open
    from precache.transfer import pull
    from precache.verification import verify
    from precache.version import Version
    from workers.buildplan import BuildPlan
    from workers.prognosis import Prognosis
    from workers.request import BuildResult

__version__ = "0.1.0"

_HOMES = {
    "precache.dataset": ["CachedDataset"],
    "precache.difference": ["diff"],
    "precache.diagnosis": ["Diagnosis", "diagnose"],
    "precache.ensured": ["ensure"],
    "precache.errors": [
        "BuildError",
        "DamageError",
        "PipelineError",
        "PrecacheError",
        "SourceError",
        "StorageError",
        "StoreError",
        "UsageError",
    ],
    "precache.garbage": ["gc"],
    "precache.inventory": ["use", "versions"],
    "precache.jobs": ["build", "doctor", "plan", "submit"],
    "precache.loader": ["Loader"],
    "precache.metering": ["Meter", "meter"],
    "precache.mixture": ["Mixture", "mix"],
    "precache.operations": [
        "CenterCrop",
        "Decode",
        "Function",
        "HorizontalFlip",
        "RandomResizedCrop",
        "Resize",
        "ToDType",
    ],
    "precache.pipeline": ["Field", "Pipeline"],
    "precache.refreshed": ["refresh", "submit_refresh"],
    "precache.stalls": ["StallReport"],
    "precache.simulation": ["Simulation", "simulate"],
    "precache.store": ["open"],
    "precache.transfer": ["pull"],
    "precache.verification": ["verify"],
    "precache.version": ["Version"],
    "workers.buildplan": ["BuildPlan"],
    "workers.prognosis": ["Prognosis"],
    "workers.request": ["BuildResult"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_ELSEWHERE = {"open": "open_version"}

__all__ = [
    "BuildError",
    "BuildPlan",
    "BuildResult",
    "CachedDataset",
    "CenterCrop",
    "DamageError",
    "Decode",
    "Diagnosis",
    "Field",
    "Function",
    "HorizontalFlip",
    "Loader",
    "Meter",
    "Mixture",
    "Pipeline",
    "PipelineError",
    "PrecacheError",
    "Prognosis",
    "RandomResizedCrop",
    "Resize",
    "Simulation",
    "SourceError",
    "StallReport",
    "StorageError",
    "StoreError",
    "ToDType",
    "UsageError",
    "Version",
    "build",
    "diff",
    "gc",
    "doctor",
    "meter",
    "mix",
    "diagnose",
    "ensure",
    "open",
    "plan",
    "pull",
    "refresh",
    "simulate",
    "submit",
    "submit_refresh",
    "use",
    "verify",
    "versions",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'precache' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), _ELSEWHERE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
