"""Finds what a running job waits for, from outside. It does not restart or change the job.

::

    proc: threads, descriptors ─▶ waits: one a thread ─▶ job: who waits for whom ─▶ causes: the likely one ─▶ text
                                        stacks: py-spy, or the process itself ─┘

Each process is observed twice, a second apart: a thread that ran in between does not hang.
"""
