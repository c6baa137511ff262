"""Reports numbers to other programs while a training runs: loggers, Prometheus, notebooks.

::

    diagnosis.watch: counters -> numbers: what happened since the last time -> monitor: DataMonitor, of all ranks
        -> loggers: TensorBoard, W&B, MLflow;  lightning, transformers: their callbacks
    stoker run: snapshots     -> numbers -> prometheus: gauges of each rank
    IPython                   -> notebook: %%stoker, %stoker_apply

Each module imports the package it is named after, and no other module imports that package.
"""
