"""Measured times of samples by stage and op, and the estimates computed from them.

Offers one harness to the probe, the plan's estimate and the doctor. Imports `shards` and lower
layers; `measurements` and `estimate` are pure.
"""
