"""Benchmarks that print what reading and building cost, beside the floor measured in the same run.

``python -m tests.bench.reading`` and ``python -m tests.bench.building``. CPU time is what counts:
wall time is shown too, and means something only while the machine is otherwise idle.
"""
