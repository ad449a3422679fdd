"""Measured times of samples by stage and op, and the estimates computed from them."""
