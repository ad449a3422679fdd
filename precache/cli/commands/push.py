"""``precache push``, which copies as ``precache pull`` does."""

from precache.cli.commands.pull import add_arguments, run

__all__ = ["add_arguments", "run"]
