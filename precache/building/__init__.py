"""Builds from Python: build, plan, ensure, refresh, submit, doctor.

Besides this package, only the viewer and the command line import `precache_workers`.
"""
