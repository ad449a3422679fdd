"""The stall meter: record a loop, add figures up over ranks, publish reports."""
