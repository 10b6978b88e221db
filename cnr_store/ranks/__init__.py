"""Many ranks of one training job: how they talk, and who writes what."""
