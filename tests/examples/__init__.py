"""Trainings as a user would write them, for one process and for torchrun."""
