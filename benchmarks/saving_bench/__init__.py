"""What the benchmark of the storage is made of."""
