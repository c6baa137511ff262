"""Settings: ``stoker tune``, ``stoker batch-size``, and what ``stoker run --apply`` changes in loaders.

::

    api: tune() -> search: which settings -> measurements: windows of each -> result
    apply: engine, cache and number of workers behind loaders of an unchanged script
"""
