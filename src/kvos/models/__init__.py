"""Models: which ones can be fetched, where they lie on this machine, and how one is opened.

The light parts (catalogue, store) can be imported by themselves; :mod:`kvos.models.load` brings torch and Transformers.
"""
