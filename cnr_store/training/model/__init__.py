"""What a model and its optimizers hold, and the names of it in a store."""
