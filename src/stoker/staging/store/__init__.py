"""Where prepared samples lie: in memory, compressed memory or on disk.

::

    sample -> encode: its arrays and the rest -> store: written once, by any worker -> decode: a fresh copy each time
    tiers: memory first, disk behind it;  folder: files that outlive the run;  manage: list, verify, prune
"""
