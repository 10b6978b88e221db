"""How kernels are built: what compiles them, and gives them instructions of the processor."""
