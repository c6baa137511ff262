"""``stoker stats`` and ``stoker.mean_std``: mean and standard deviation of each channel of an image dataset.

::

    images (in workers) -> moments, never pixels -> reading: merged -> result
"""
