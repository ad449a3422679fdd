"""The Python face of builds: build, plan, ensure, refresh, submit, doctor.

The only package of precache that calls `precache_workers`, viewers and verification apart.
"""
