"""What a build is to do, found before it does any of it.

Nothing here decodes a sample or imports Ray.
"""
