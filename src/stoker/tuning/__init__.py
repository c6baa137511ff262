"""Settings: ``stoker tune`` (a search), ``stoker batch-size``, and what ``stoker run --apply`` gives to loaders.

::

    api -> search: tries settings -> measurements -> summary -> result
    apply: engine, cache and number of workers behind loaders of a script that nobody edited
"""
