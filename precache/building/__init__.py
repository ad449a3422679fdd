"""Builds from Python: build, plan, ensure, refresh, submit, status, cancel, doctor; verify.

Besides this package, only viewers and the command line call `precache_workers`.
"""
