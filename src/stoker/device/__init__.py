"""Page-locked memory: whether it pays (``policy``), what is locked (``walk``), and how: the slots themselves
(``locked``, on ``cudart``), or a copy made by a thread, as torch does (``thread``)."""
