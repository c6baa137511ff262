"""Handles samples and workers that fail: ``policy`` says what is allowed, ``guard`` enforces it.

::

    sample fails -> guard: retry, skip or raise -> error_log: what was lost, also in a file for the next run
"""
