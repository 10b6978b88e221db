"""The process that trains: its signals, its end, and its threads."""
