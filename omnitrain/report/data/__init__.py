"""Packs and data sets as people look at them: on a page, in a notebook, in a terminal."""
