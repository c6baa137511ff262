"""The class behind ``worker_method="ray"``: the entry point ``ray`` of the group ``stoker.workers``."""

from __future__ import annotations

from stoker.workers.process_pool import ProcessPool
from stoker.workers.protocol import WorkerSpec

from .cluster import checked_address
from .nodes import Nodes, check_dataset
from .pool import RemotePool


class RayNodes(Nodes):
    """See ``stoker.workers.protocol.OtherMachines``."""

    check = staticmethod(checked_address)

    def around(self, workers: ProcessPool, spec: WorkerSpec) -> RemotePool:
        check_dataset(spec)
        self.begin(spec)
        return RemotePool(workers, self, spec)
