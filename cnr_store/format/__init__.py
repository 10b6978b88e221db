"""Format 1 as plain data: keys, documents and their proofs. No I/O happens here."""
