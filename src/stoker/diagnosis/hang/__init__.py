"""What a running job waits for, seen from outside; nothing is restarted and nothing is written.

::

    proc: threads, descriptors ─▶ waits: one a thread ─▶ job: who waits for whom ─▶ causes: the likely one ─▶ text
                                        stacks: py-spy, or the process itself ─┘

Each process is looked at twice, a second apart: what moved between the looks does not hang.
"""
