"""How long the first save and load of a process take that finds no compiled kernels."""
