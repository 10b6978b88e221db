"""Ordinary scripts at the defaults: what they write, beside `torch.save`."""
