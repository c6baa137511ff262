"""Workers: fetching, collating and handling faults inside them, and the pools of processes and threads they run in.

::

    task -> process_main | thread_pool -> task_runner -> fetcher -> dataset, collate -> transport

    process_pool   tasks out, results in; uses
      process_table  the processes, their pipes and memory
      launch         starts one process: by fork, or from fork_server
      health         finds workers that died, take too long, or deadlocked
    restart        reassigns a dead worker's tasks, and finds the sample to blame

A pool owns its workers and the tasks they hold; the scheduler in ``loader`` owns the order of batches.
"""
