"""``DataLoader``, its iterators, the scheduler, and ``auto``: what ``num_workers="auto"`` decides.

::

    dataloader -> engine: chooses an iterator
      pool_iterator:   scheduler -> workers -> batches in the sampler's order
      inline_iterator: the training process makes each batch itself
      device_iterator: all samples lie on the accelerator

The engine owns what outlives an iterator (``LoaderState``: arenas, position, workers that stay); an iterator owns its
tasks in flight.
"""
