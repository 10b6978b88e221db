"""Triton kernels, and how they are launched. Only `devices.support` imports this room, and only where Triton is."""
