"""Bytes written and kept by policy and width."""
