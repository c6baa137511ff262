"""Rules that find, from a report's counters, what keeps a loop waiting.

::

    LoaderReport -> LoaderStats (loader_stats.py) -> each rule: Found or None -> verdict.py: findings, ranking, verdict

A rule is a function named after its cause. ``workers.py``: number of workers, their threads and start-up;
``sample_code.py``: code that runs in a task; ``storage.py``; ``memory.py``; ``device.py``: copies, synchronisation,
page-locked memory; ``loop.py``: transport, prefetching and the loop's own work.
"""
