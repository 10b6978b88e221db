"""`cnr report` and `watch`: how saves of a store went, as a page and live in the terminal."""
