"""Page-locked memory, and batches on the accelerator.

::

    batch in host memory -> pinned_slots | a copy (pin_policy decides) -> prefetch: copied while the last step computes

``cuda`` wraps the CUDA runtime and driver; ``accelerator`` finds the device. ``pin_policy`` bounds page-locked memory,
which is unlocked with the slot that owns it.
"""
