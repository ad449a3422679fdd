"""Builds from Python: build, plan, ensure, refresh, submit, status, cancel, doctor.

Besides this package, only viewers, verification and the command line call `precache_workers`.
"""
