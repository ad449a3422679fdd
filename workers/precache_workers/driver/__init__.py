"""A build from listing to commit: its plan, repair, progress and report.

Offers `build.run_build`, `build_plan.run_plan` and `refresh.refresh_once`. Decides by `planning`
and runs tasks of `shards` through `cluster`.
"""
