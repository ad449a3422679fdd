"""Builds from Python: build, plan, ensure, refresh, submit, doctor.

Besides this package, only the command line imports `precache_workers`.
"""
