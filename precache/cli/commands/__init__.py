"""One module for each command, imported only when that command is called.

`add_arguments` adds its arguments to a parser. `run` takes the parsed options, and returns the exit
status where it may be other than 0; its docstring is the command's description in the help.
"""
