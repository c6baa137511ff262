"""What knows nothing of loaders: errors, options, the machine, processes, files, a terminal, a look into user objects.

Nothing flows through here: every other package imports this one, and it imports none of them. ``errors``, ``options``,
``files``, ``terminal``, ``progress``, ``output``, ``resources``, ``gpus``, ``monitor``, ``processes`` and ``metrics``
stay free of torch, so that the command line starts fast.
"""
