"""The codecs as other libraries know them, and what is taken from those libraries. Each module imports one."""
