"""Decisions: when a version is whole, how wide codes are, and a simulation of both. Imports no storage and no torch."""
