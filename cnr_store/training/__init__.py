"""Training side of the store: finding tables, tracking changed rows, and moving tensors. Needs torch."""
