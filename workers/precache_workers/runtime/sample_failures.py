"""Exceptions that count as the failure of a sample, of all that code outside precache may raise."""

from __future__ import annotations

import threading

from precache_workers.runtime.time_limit import samples_at_work


def fails_sample(error: BaseException) -> bool:
    """Return False for an exception that stops the work, and is not one of the sample's own code.

    Ctrl-C reaches the main thread alone, and samples are at work on others.
    """
    if isinstance(error, Exception | SystemExit):
        return True
    main = threading.current_thread() is threading.main_thread()
    return not (main or samples_at_work().given_up)
