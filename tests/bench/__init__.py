"""Benchmarks that print what reading, building and measuring cost, beside a floor of the same run.

``python -m tests.bench.MODULE [PART]``. CPU time is what counts: wall time is shown too, and means
something only while the machine is otherwise idle.
"""
