"""Find the bottleneck of a training loop, predict the gain of remedies; benchmark a store.

`loop_probes` measures; `verdict` and `remedies` are pure functions of the measurements.
"""
