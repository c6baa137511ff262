"""What runs inside a worker, and what happens to it: fetch, collate, faults; pools of processes and of threads.

::

    task -> process_main | thread_pool -> task_runner -> fetcher -> dataset, collate -> transport
    process_pool: starts workers, hands out tasks, notices death and hangs -> restart: what becomes of their tasks

A pool owns its workers and the tasks they hold; the scheduler in ``loader`` owns the order of batches.
"""
