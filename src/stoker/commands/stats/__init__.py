"""``stoker stats``: mean and standard deviation of an image dataset, by channel, and what else its samples show.

::

    images (in workers) -> moments, never pixels -> reading: merged -> result
"""
