"""A device of torch's own kind that is neither the CPU nor CUDA: copies to it are synchronous."""

from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("other")
_library = torch.library.Library("aten", "IMPL")

asynchronous: list[bool] = []
"""Of each copy, whether the caller did not wait for it."""


class OtherTensor(torch.Tensor):
    """A tensor of the device; its values are a tensor of the CPU."""

    host: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"the device has no {func}")


def _implement(name: str) -> Any:
    return lambda function: _library.impl(name, function, "PrivateUse1")


def _tensor(host: torch.Tensor) -> torch.Tensor:
    if host.dtype == torch.float64:
        raise TypeError("the device has no float64")
    tensor = torch._C._acc.create_empty_tensor(host.shape, host.dtype)
    tensor.__class__ = OtherTensor
    tensor.host = host
    return tensor


@_implement("empty.memory_format")
def _empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _tensor(torch.zeros(size, dtype=dtype))


@_implement("empty_strided")
def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _tensor(torch.zeros(size, dtype=dtype))


@_implement("_copy_from")
def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> torch.Tensor:
    asynchronous.append(non_blocking)
    if isinstance(target, OtherTensor):
        target.host = source.clone()
    else:
        target.copy_(source.host)
    return target
