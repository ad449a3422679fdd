"""The tree of errors is the one that its module draws."""

import inspect

import pytest
from torch.utils.data import DataLoader, Dataset

from precache import errors
from precache.errors import PrecacheError

CLASSES = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, PrecacheError)
]


def _drawn() -> dict[str, str]:
    """Name -> parent, as the docstring draws them."""
    assert errors.__doc__ is not None
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in errors.__doc__.splitlines():
        bare = line.lstrip(" │├└─")
        name = bare.split(" ")[0]
        if not name.endswith("Error") or not (set(line) & set("├└") or bare == "PrecacheError"):
            continue
        depth = (len(line) - len(bare) - 4) // 4
        path[depth:] = [name]
        if depth:
            parents[name] = path[depth - 1]
    return parents


def test_the_docstring_draws_the_tree_and_wrong_requests_alone_exit_with_2() -> None:
    actual = {c.__name__: c.__base__.__name__ for c in CLASSES if c is not PrecacheError}
    assert _drawn() == actual
    for each in CLASSES:
        assert each.exit_status == (2 if issubclass(each, errors.UsageError) else 1)


class Damaged(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise errors.DamageError("the shard\nhas \x1b[31m red bytes")


def test_an_error_of_a_worker_of_torch_keeps_the_lines_of_its_traceback() -> None:
    with pytest.raises(errors.DamageError) as caught:
        list(DataLoader(Damaged(), num_workers=1))
    *lines, last = str(caught.value).splitlines()
    assert lines[0] == "Caught DamageError in DataLoader worker process 0."
    assert last == r"precache.errors.DamageError: the shard\nhas \x1b[31m red bytes"
