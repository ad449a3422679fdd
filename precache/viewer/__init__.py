"""Show a version in a browser: a local server, or one static page.

`view.view` is its entry. Imports `reading`, `store`, `recipe`, `storage` and `html`.
"""
