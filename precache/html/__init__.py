"""Pages, charts and PNGs that stand alone: one style sheet, one content policy.

Templates and style sheets lie beside the modules.
"""
