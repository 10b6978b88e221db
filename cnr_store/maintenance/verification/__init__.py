"""What is damaged or lost in a store, and what can still be restored."""
