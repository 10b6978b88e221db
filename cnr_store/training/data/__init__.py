"""Where the data stands: readers that resume after the last sample trained on."""
