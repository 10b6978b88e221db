"""The codecs as plugins of other libraries, and what comes from those libraries. Each module imports one library."""
