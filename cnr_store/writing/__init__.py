"""The one way to write: a plan, its shards, and the commit of a version."""
