"""Find the bottleneck of a training loop, predict the gain of remedies; benchmark a store.

`loop_probes` measures; `loop_model` and `judgement` are pure functions of the measurements.
"""
