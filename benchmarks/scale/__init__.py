"""Beyond what this machine can show: ``measure`` what things cost here, ``model`` more of them, and ``compare``."""
