"""Which stage starves the accelerator: ``watch`` measures inside the script, ``doctor`` judges, ``report`` shows.

::

    watch: counters and stacks -> report.schema -> doctor: one finding per cause -> report: text, HTML, JSON
    hang: a running job, from outside -> its cause

The watched process owns its counters and sends them; the command owns the report.
"""
