"""Finds the deterministic part of a dataset, keeps what it gives, and runs the random part every time.

::

    trial: runs a few samples -> plan: where the cut lies -> verify: same bits under other random states
    dataset (Staged): index -> store (kept) | first part (computed, then kept) -> second part -> sample

A plan is found in a forked child and changes nothing in the script. ``store`` owns the memory and the files.
"""
