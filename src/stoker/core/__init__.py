"""Helpers that know nothing of loaders: errors, options, the machine, processes, files, the terminal, user objects.

Every other package imports this one; it imports none of them. ``errors``, ``options``, ``files``, ``terminal``,
``progress``, ``output``, ``resources``, ``gpus``, ``monitor``, ``processes`` and ``metrics`` stay free of torch, so
that the command line starts fast.
"""
