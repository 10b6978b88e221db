"""Looking after stores: proving, deleting and folding versions."""
