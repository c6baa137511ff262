"""``num_workers="auto"``: a first number from the machine, corrected while batches are made. Nothing is measured before
the first batch.

::

    decide: before an iterator   <- limits: a first guess
    controller: within an epoch, the number of workers
    in_process: for each epoch, whether to use workers at all

    bench: the loop with which stoker tune measures  <- tasks: indices
"""
