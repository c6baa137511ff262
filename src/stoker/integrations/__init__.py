"""What other programs are told while a training runs: loggers, Prometheus, notebooks.

::

    diagnosis.watch: counters -> numbers: what happened since the last time -> ranks: of all ranks
        -> monitor: DataMonitor -> loggers: TensorBoard, W&B, MLflow;  lightning, transformers: their callbacks
    stoker run: snapshots     -> numbers -> prometheus: gauges of each rank
    IPython                   -> notebook: %%stoker, %stoker_apply

Each module imports what it is named after, and nothing else imports that.
"""
