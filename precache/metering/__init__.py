"""The stall meter: record a training loop, collect figures of all ranks, publish reports.

`meter.meter` measures any loader. Imports the clocks of `runtime` and `loading`, and
`outputs`; nothing here reads a store.
"""
