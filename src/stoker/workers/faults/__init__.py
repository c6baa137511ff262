"""What happens when a sample or a worker fails: ``policy`` says what is allowed, ``guard`` keeps to it.

::

    sample fails -> guard: retry, skip or raise -> error_log (what was lost) -> quarantine (a file for the next run)
"""
