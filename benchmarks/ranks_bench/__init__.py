"""What one save of many ranks sends and writes, and how long it takes."""
