"""The name of this node, as receipts have it."""

from __future__ import annotations

import os
import socket

NODE = "PRECACHE_NODE"
"""Environment variable: the name of the node in receipts, in place of the machine's name."""


def node_name() -> str:
    """Return the name of this node in receipts."""
    return os.environ.get(NODE) or socket.gethostname()
