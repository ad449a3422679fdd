"""Tasks run on Ray or in this process: bounded submission, retries, placement.

With `jobs` and the metrics of `driver` the only importers of Ray.
"""
