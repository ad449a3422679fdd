"""One module for each command, imported only when that command is called.

`add_arguments` adds its arguments to a parser; `run` takes the parsed options and returns the exit
status. The docstring of `run` is the command's description in its help.
"""
