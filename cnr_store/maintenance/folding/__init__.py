"""Versions stored once more without their chains."""
