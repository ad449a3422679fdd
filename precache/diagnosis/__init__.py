"""Whether the loader limits a training loop, and which remedy would help; the benchmark of a store.

Probes measure, `verdict` and `remedies` judge; these are pure.
"""
