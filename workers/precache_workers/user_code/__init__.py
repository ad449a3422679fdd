"""The user's own functions and datasets: what identifies their code, and loading them by name.

`identity` follows names from statement to statement without running them; `loading` imports, and
refuses what this process imported in another state.
"""
