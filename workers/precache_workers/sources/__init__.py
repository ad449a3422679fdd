"""Where samples are listed and fetched; the user's own code and its identity."""
