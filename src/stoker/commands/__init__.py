"""The command line: one file a command; ``main`` lists them. Each asks the packages to its left and prints."""
