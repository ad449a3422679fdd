"""The command line: `main` lists the commands, and each has a module in `commands`."""
