"""DCP on a store in one process."""
