"""The command line, derived from the public functions.

`commands` lists them and `main` runs one; `signatures` makes a parser of a function's signature and
docstring, and `calls` calls it and prints the result.
"""
