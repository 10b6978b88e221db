"""Many ranks: who holds which rows, who writes which shard, and what ranks send one another. Imports no torch."""
