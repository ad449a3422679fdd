"""A limit of time for each sample, in a worker's process."""
