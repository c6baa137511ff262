"""Finds the deterministic part of a dataset, caches its results, and runs the random part every time.

::

    once        trial (draws the whole flow): samples -> search -> plan -> verify, in a forked child (isolate)
    each time   dataset (Staged): index -> store | head (computed, then kept) -> tail -> sample

A trial changes nothing in the script. ``store`` owns memory and files.
"""
