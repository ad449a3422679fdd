"""Planning: decide what a build does, as data, before it does any of it.

`work_plan` finds the target version and the base version; `shard_actions` decides how each row
comes about, and `copied_rows` what of it is linked or copied by chunks. Tasks execute these actions
on writers, `shard_plan` on counters for the dry run. Nothing here decodes a sample or imports Ray.
"""
