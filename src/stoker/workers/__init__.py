"""Workers: who runs the tasks. ``protocol`` is the border, ``process`` the kind that is there today."""
