"""`cnr demo`: a real training run that is killed in the middle of a save, and what its checkpoints cost."""
