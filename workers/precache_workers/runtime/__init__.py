"""Time limits for samples, and the name of the node, in a worker's process."""
