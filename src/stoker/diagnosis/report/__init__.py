"""Reports: their schema and how they are shown. ``build`` makes one from what the watched processes sent."""
