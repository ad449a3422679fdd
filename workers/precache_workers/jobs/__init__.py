"""Builds as jobs of a Ray cluster: pack one, submit it, follow it, stop it.

`job_package` collects what a job takes along, `submission` talks to the cluster by Ray's client,
which `job_server` alone imports. Uses `planning` for options; nothing here runs a task.
"""
