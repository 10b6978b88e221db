"""Pace of kernels, saves and loads of tables on a GPU, beside plain copies and others' saves."""
