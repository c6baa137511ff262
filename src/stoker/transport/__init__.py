"""Transport: how a batch crosses from a worker to the consumer. See ``ring`` for the memory, ``codec`` for the bytes."""
