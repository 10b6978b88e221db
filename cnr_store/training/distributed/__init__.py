"""What this process holds of a model that is shared over ranks."""
