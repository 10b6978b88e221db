"""The one way to read: arrays composed from the versions that hold their rows."""
