"""The lattice: rows as integers on one step, or on a floating grid."""
