"""``num_workers="auto"``: a first number from the machine, corrected while batches are made. Nothing is measured before
the first batch.

::

    limits -> decide -> controller: more or fewer workers;  in_process: workers or none
    bench: the one loop that measures, for ``stoker tune`` too
"""
