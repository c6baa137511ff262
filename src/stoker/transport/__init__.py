"""Transport: how a batch crosses from a worker to the consumer: ``ring`` the memory, ``codec`` the bytes."""
