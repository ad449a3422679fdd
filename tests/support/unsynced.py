"""Files that are not synced to the disk, once this module is imported.

No test outlives its machine, and each build would wait for the disk some twenty times. What is
synced, and what is said where that fails, `tests/storage/test_local.py` holds.
"""

import os

os.fsync = lambda fd: None
