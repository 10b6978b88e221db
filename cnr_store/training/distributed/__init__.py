"""The ranks of a training job: what this process holds of a model, and how it reaches the others."""
