"""Format 2 as plain data: keys, documents and their proofs. No I/O happens here."""
