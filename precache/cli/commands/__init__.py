"""One module for each command, imported only when that command is called.

`add_arguments` adds the command's arguments to a parser. `run` takes the parsed options; it returns
the exit status if that can differ from 0. Its docstring is the command's description in the help.
"""
