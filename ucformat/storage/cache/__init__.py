"""A cache on the disk of the host for files that are read over a network."""
