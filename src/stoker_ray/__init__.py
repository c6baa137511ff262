"""Workers on other machines, by Ray Core actors: ``worker_method="ray"``.

A package of its own: ``stoker`` does not import it. The entry point ``ray`` of ``stoker.workers`` names ``entry``.

::

    trainer                                                 each other node of the cluster
    scheduler -> pool.RemotePool --+-> ProcessPool (here)
                                   +-> Ray actor call ----> node.NodeWorkers -> ProcessPool
                results.RemoteResult <-- object store <---- encoded batches

A task with seeds of its own is a pure function of the dataset, its indices and its seed. So it may be run anywhere, and
twice: the first answer counts. The order is the scheduler's. Ray carries calls and batches, and starts the actors; it
decides nothing about data.

A dataset with a cache has one on each node, and nodes ask each other for what is in it (``cluster_cache``,
``peer_link``). ``staged`` says what of it travels.

``cluster`` connects and finds nodes, ``shipment`` is what a node needs, ``checks`` compares versions and batches.
"""
