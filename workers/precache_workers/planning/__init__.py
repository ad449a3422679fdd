"""Planning: decide what a build does, as data, before it does any of it.

`work_plan` finds the target version and the base version; `shard_actions` decides how each row
comes about, which tasks execute and `shard_plan` sums up for the dry run. Nothing here decodes a
sample or imports Ray.
"""
