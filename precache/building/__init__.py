"""Builds from Python: build, plan, ensure, refresh, submit, status, cancel, doctor; verify.

Besides this package, only the viewer and the command line import `precache_workers`.
"""
