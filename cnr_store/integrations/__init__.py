"""Other frameworks' ways in; each module needs its framework."""
