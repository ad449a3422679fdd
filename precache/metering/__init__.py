"""The stall meter: record a training loop, collect figures of all ranks, publish reports."""
