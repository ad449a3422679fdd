"""The name of this node, as receipts have it."""

from __future__ import annotations

import os
import socket

NODE = "PRECACHE_NODE"
"""Environment variable: what receipts call the node, in place of the machine's name."""


def node_name() -> str:
    """What receipts call this node."""
    return os.environ.get(NODE) or socket.gethostname()
