"""Execution of tasks in this process, in worker processes or on Ray, with retries and placement.

Ray is imported here, and by the job server's client in `jobs`.
"""
