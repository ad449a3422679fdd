"""Show a version in a browser: a local server, or one static page."""
