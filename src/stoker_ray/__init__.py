"""Workers on other machines, as Ray Core actors: ``worker_method="ray"``.

A separate package: ``stoker`` does not import it. The entry point ``ray`` of ``stoker.workers`` names ``entry``.

::

    trainer                                                 each other node of the cluster
    scheduler -> pool.RemotePool --+-> ProcessPool (here)
                                   +-> Ray actor call ----> node.NodeWorkers -> ProcessPool
                   pool.RemoteResult <-- object store <---- encoded batches

A task with its own seed is a pure function of the dataset, its indices and its seed. So it may be run anywhere, and
even twice: the first answer counts. The scheduler determines the order. Ray carries calls and batches, and starts the
actors; it decides nothing about data.

A dataset with a cache has one on each node, and nodes ask each other for cached samples (``cluster_cache``,
``peer_link``).

``cluster`` connects and finds nodes, ``shipment`` packs what a node needs, ``checks`` compares versions and batches.
"""
