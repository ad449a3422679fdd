"""A build from listing to commit: its plan, repair, progress, metrics and report."""
