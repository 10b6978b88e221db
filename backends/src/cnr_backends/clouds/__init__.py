"""Object stores whose servers refuse a conditional write to a key that is taken."""
