"""``DataLoader``, its iterators, the scheduler, and ``auto``, which implements ``num_workers="auto"``.

::

    dataloader -> engine: chooses an iterator
      pool_iterator:   scheduler -> workers -> batches in the sampler's order
      inline_iterator: the training process makes each batch itself
      device_iterator: all samples lie on the accelerator

The engine owns what outlives an iterator (``LoaderState``: arenas, position, persistent workers); an iterator owns its
tasks in flight.
"""
