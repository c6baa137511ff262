"""Staging: what is the same in every epoch is done once; ``Staged``, ``split``, and how the border is found."""
