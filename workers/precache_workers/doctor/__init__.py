"""Measurements of a source and this machine before anything is cached, and predictions.

`measure` takes the measurements, `report` computes predictions from them as a pure function, and
`text` and `page` show these. Uses the tasks and the driver of a build; no Ray.
"""
