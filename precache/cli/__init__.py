"""The command line, derived from the public functions.

`main` lists the commands, `signatures` makes a parser of a function's signature and docstring, and
`calls` calls it and prints the result.
"""
