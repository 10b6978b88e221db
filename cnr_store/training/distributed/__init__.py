"""What is particular to torch.distributed: process groups and the store they share."""
