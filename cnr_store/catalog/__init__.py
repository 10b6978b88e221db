"""What versions exist, and who may write the next one."""
