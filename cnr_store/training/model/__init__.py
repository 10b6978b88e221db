"""What a model and its optimizers hold, and how it is called in a store."""
