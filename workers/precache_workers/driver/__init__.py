"""A build from listing to commit: its plan, repair, progress, metrics and report.

Offers `build.run_build`, `build_plan.run_plan` and `refresh.refresh_once`. It decides by `planning`,
runs tasks of `shards` through `cluster`, and reads no pixel. Only `metrics` imports Ray.
"""
