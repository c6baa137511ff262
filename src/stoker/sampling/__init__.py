"""Which samples, in which order, seeded how, and where in the epoch a run is.

::

    sampler -> order, replay -> (task number, indices) -> loader.scheduler
    cursor: which tasks were delivered -> state -> state_dict()
    seeding, task_seeds, generators: the random state that each task starts with

The training process owns the order and the cursor. Workers only receive seeds. Random state itself is captured and put
back by ``core.random_state``.
"""
