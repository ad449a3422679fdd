"""The command line: one file per command, over the public functions."""
