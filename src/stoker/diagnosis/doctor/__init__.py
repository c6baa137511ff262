"""Rules over a report's counters, one file a cause; ``verdict`` asks all of them.

::

    an entry of the report -> loader_stats: its numbers -> each rule: a Finding or None -> verdict
"""
