"""k-means: a row as codes of the nearest centroids of a codebook."""
