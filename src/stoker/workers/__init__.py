"""What runs inside a worker, and what happens to it: fetch, collate, faults; pools of processes and of threads.

::

    task -> process_main | thread_pool -> task_runner -> fetcher -> dataset, collate -> transport

    process_pool   tasks out, results in; uses
      process_table  the processes, their pipes and memory
      launch         starts one process: by fork, or from fork_server
      health         finds workers that died, take too long, or deadlocked
    restart        what becomes of a dead worker's tasks, and which sample is to blame

A pool owns its workers and the tasks they hold; the scheduler in ``loader`` owns the order of batches.
"""
