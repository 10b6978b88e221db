"""Row-wise codecs for embedding tables."""
