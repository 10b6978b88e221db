"""Sound versions made out of damaged ones."""
