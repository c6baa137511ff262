"""The pages, and ``generate``, which makes those that come from the source."""
