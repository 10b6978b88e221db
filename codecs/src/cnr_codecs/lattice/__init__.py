"""The lattice: rows as integers on one step, entropy-coded."""
