"""Description of the machine and its libraries, for bug reports and benchmarks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path

import precache
from precache.codecs import kernels
from precache.runtime.usage import cores

_LIBRARIES = (
    "torch numpy zarr numcodecs pydantic fsspec obstore gcsfs ray simplejpeg pillow pyarrow "
    "backports.zstd"
)


@dataclass(frozen=True)
class Installation:
    """The machine, and the libraries that are installed.

    Attributes
    ----------
    cores
        CPU cores that this process may use.
    libraries
        Versions by name; a library that is not installed is left out.
    compiled
        The compiled code of precache can be loaded.
    """

    precache: str
    python: str
    platform: str
    cpu: str
    cores: int
    compiled: bool
    libraries: dict[str, str]

    @classmethod
    def here(cls) -> Installation:
        """Describe this process's installation."""
        versions = {}
        for name in _LIBRARIES.split():
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        return cls(
            precache=precache.__version__,
            python=platform.python_version(),
            platform=platform.platform(),
            cpu=_cpu_model(),
            cores=cores(),
            compiled=kernels.compiled().functions is not None,
            libraries=versions,
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values, for people."""
        return [
            ("precache", self.precache if self.compiled else f"{self.precache}, not compiled"),
            ("Python", self.python),
            ("platform", self.platform),
            ("CPU", f"{self.cpu}, {self.cores} cores"),
            *self.libraries.items(),
        ]

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.rows())


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()
