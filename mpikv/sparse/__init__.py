"""Pushes and pulls of rows: a row travels to its owner, and from the owner to the ranks that ask for it.

It imports ``engine``. It never looks at a caller's arguments.
"""
