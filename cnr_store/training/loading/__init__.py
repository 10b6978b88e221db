"""From a version back into a model and its optimizers."""
