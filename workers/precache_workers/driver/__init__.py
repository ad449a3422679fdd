"""A build from listing to commit: repair, progress, metrics, report, plan."""
