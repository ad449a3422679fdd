"""Planning: decide what a build does, as data, before it does any of it.

`work_plan` finds the version to complete, and looks up in the `catalogue` which of its rows other
versions store. `assembly` makes runs of a shard's rows of that: tasks execute them, `shard_plan`
counts them for the plan. Nothing here decodes a sample or imports Ray.
"""
