"""The codecs as other libraries know them. Each module imports one such library; the rest imports none."""
