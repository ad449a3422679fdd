"""Pages about a store over HTTP, for this machine alone, or one page in a file."""
