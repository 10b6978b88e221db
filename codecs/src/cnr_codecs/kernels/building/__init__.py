"""How kernels are built: what compiles them, merges their helpers, and gives them instructions of the processor."""
