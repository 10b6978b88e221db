"""From the state of a moment to a committed version, in the background."""
