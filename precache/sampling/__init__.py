"""Orders of rows, as pure functions of (seed, epoch, position).

No storage, no threads.
"""
