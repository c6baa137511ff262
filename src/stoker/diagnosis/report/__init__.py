"""Reports: what was seen, as JSON (``schema``) and for people (``text``, ``terminal``)."""
