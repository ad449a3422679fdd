"""Threads, clocks, CPU and memory of this machine, the identity of processes, the terminal.

Nothing here depends on stores.
"""
