"""Other loaders on the same workloads, each in an environment of its own: ``python -m benchmarks.peers``."""
