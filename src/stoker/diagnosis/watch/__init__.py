"""Inside the watched script: what is timed, and how it leaves the process.

::

    patch: torch's DataLoader -> iterators, fetch, clock, device: times -> watch: sends a snapshot each second
    stack_sampler: which line runs in a fetch;  worker_record, shared_counters: the same from inside workers
"""
