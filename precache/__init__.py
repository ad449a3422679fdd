"""Decode once, off the training node; train from memory-mapped tensors.

Importing this package loads neither torch nor Ray nor a decoder; each name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precache.building.api import build, doctor, plan, submit
    from precache.building.ensure import ensure
    from precache.building.jobs import cancel, status
    from precache.building.refresh import refresh, submit_refresh
    from precache.diagnosis.bench import bench
    from precache.diagnosis.diagnose import Diagnosis, diagnose
    from precache.errors import (
        BuildError,
        DamageError,
        PrecacheError,
        RecipeError,
        SourceError,
        StorageError,
        StoreError,
        UsageError,
    )
    from precache.loading.dataset import CachedDataset
    from precache.loading.loader import Loader
    from precache.loading.mixing import Mixture, mix
    from precache.loading.options import Block, Cache
    from precache.loading.tuple_batch import TupleBatch
    from precache.maintenance.diff import diff
    from precache.maintenance.gc import gc
    from precache.maintenance.info import info
    from precache.maintenance.transfer import pull, push
    from precache.maintenance.verify import verify
    from precache.maintenance.versions import use, versions
    from precache.metering.meter import Meter, meter
    from precache.metering.report import StallReport
    from precache.recipe.ops import (
        CenterCrop,
        Decode,
        Function,
        HorizontalFlip,
        RandomResizedCrop,
        Resize,
        ToDType,
    )
    from precache.recipe.recipe import Field, Recipe
    from precache.simulation.model import Simulation, simulate
    from precache.store.open import open_version as open
    from precache.store.version import Version
    from precache.viewer.view import view
    from precache_workers.doctor.report import DoctorReport
    from precache_workers.driver.build_plan import BuildPlan
    from precache_workers.driver.build_result import BuildResult

__version__ = "0.1.0"

_NAMES = {
    "precache.loading.dataset": "CachedDataset",
    "precache.maintenance.diff": "diff",
    "precache.diagnosis.diagnose": "Diagnosis diagnose",
    "precache.building.ensure": "ensure",
    "precache.building.jobs": "cancel status",
    "precache.diagnosis.bench": "bench",
    "precache.errors": "BuildError DamageError RecipeError PrecacheError SourceError "
    "StorageError StoreError UsageError",
    "precache.maintenance.gc": "gc",
    "precache.maintenance.versions": "use versions",
    "precache.building.api": "build doctor plan submit",
    "precache.loading.loader": "Loader",
    "precache.metering.meter": "Meter meter",
    "precache.loading.mixing": "Mixture mix",
    "precache.loading.options": "Block Cache",
    "precache.loading.tuple_batch": "TupleBatch",
    "precache.recipe.ops": "CenterCrop Decode Function HorizontalFlip "
    "RandomResizedCrop Resize ToDType",
    "precache.recipe.recipe": "Field Recipe",
    "precache.building.refresh": "refresh submit_refresh",
    "precache.maintenance.verify": "verify",
    "precache.metering.report": "StallReport",
    "precache.simulation.model": "Simulation simulate",
    "precache.store.open": "open",
    "precache.maintenance.info": "info",
    "precache.maintenance.transfer": "pull push",
    "precache.store.version": "Version",
    "precache.viewer.view": "view",
    "precache_workers.driver.build_plan": "BuildPlan",
    "precache_workers.doctor.report": "DoctorReport",
    "precache_workers.driver.build_result": "BuildResult",
}
"""Modules, and the public names that each of them has."""
_HOME_OF = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Block",
    "BuildError",
    "BuildPlan",
    "BuildResult",
    "Cache",
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
    "Recipe",
    "RecipeError",
    "PrecacheError",
    "DoctorReport",
    "RandomResizedCrop",
    "Resize",
    "Simulation",
    "SourceError",
    "StallReport",
    "StorageError",
    "StoreError",
    "ToDType",
    "TupleBatch",
    "UsageError",
    "Version",
    "bench",
    "build",
    "cancel",
    "diff",
    "gc",
    "doctor",
    "meter",
    "mix",
    "diagnose",
    "ensure",
    "info",
    "open",
    "plan",
    "pull",
    "push",
    "refresh",
    "simulate",
    "status",
    "submit",
    "submit_refresh",
    "use",
    "verify",
    "versions",
    "view",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'precache' has no attribute {name!r}")
    own_name = "open_version" if name == "open" else name
    value = getattr(importlib.import_module(_HOME_OF[name]), own_name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
