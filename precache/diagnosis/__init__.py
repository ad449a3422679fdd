"""Find the bottleneck of a training loop, and predict the gain of remedies.

`loop_probes` measures; `loop_model` and `judgement` are pure functions of the measurements.
"""
