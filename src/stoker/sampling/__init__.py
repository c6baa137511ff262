"""Decides which samples come in which order and with which seeds, and tracks a run's position in the epoch.

::

    sampler -> order, replay -> (task number, indices) -> loader.scheduler
    cursor: which tasks were delivered -> state -> state_dict()
    seeding, task_seeds, generators: the random state that each task starts with

The training process owns the order and the cursor. Workers only receive seeds. ``core.random_state`` captures and
restores random state itself.
"""
