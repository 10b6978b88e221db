"""The command `cnr`."""
