"""Rules over a report's counters: which cause keeps a loop waiting.

::

    LoaderReport -> LoaderStats (loader_stats.py) -> each rule: Found or None -> verdict.py: findings, ranking, verdict

A rule is a function that has its cause's name. ``workers.py``: their number, threads and start; ``sample_code.py``:
what runs in a task; ``storage.py``; ``memory.py``; ``device.py``: copies, synchronisation, page-locked memory;
``loop.py``: transport, prefetching and what the loop itself does.
"""
