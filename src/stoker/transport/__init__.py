"""How a batch crosses from a worker to the training process: shared memory, slots, messages.

::

    worker: codec -> slot in an arena -> message on a pipe -> training process: views of the slot -> slot free again

A worker owns a slot while it fills it; the consumer owns it from the message until nothing refers to the batch.
``slots`` has a diagram of a slot's life.
"""
