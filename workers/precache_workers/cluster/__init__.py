"""Execution of tasks: in this process or on Ray, with bounded submission, retries, placement.

Ray is imported here, by the job server's client in `jobs`, and by the metrics of `driver`.
"""
