"""Self-contained HTML pages, charts and PNGs: the only templates, style sheet and content policy.

Templates, style sheets and the player's script lie beside the modules. Every page of precache goes
through `pages.render`.
"""
