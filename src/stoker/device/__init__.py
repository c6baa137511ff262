"""Page-locked memory, and batches on the accelerator.

::

    batch in host memory -> pinned_slots | a copy (pin_policy decides) -> prefetch: copied while the last step computes

``cuda`` is the runtime library by ctypes; ``accelerator`` says which device there is. Page-locked memory is
bounded by ``pin_policy`` and unlocked by the slot that owns it.
"""
