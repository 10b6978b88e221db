"""Rows where they are: flagged, selected, quantized and decoded on the device that holds them."""
