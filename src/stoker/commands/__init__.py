"""The command line: one file per command, listed in ``main``. Each calls the packages to its left and prints."""
