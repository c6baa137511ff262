"""Where prepared samples are stored: in memory or on disk.

::

    sample -> encode: its type (spec) and the bytes of its leaves -> store: written once, by any worker
           <- decode: a fresh copy each time                      <-

    store: which samples are stored, and where;  head: the fields that all processes share
    tables: rows of columns, and block: samples of other types, in a heap
    memory, folder: what tables are made of;  manage: list, verify and remove caches on disk
"""
