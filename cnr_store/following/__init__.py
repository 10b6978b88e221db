"""The rows that new versions change, for those who serve what is trained."""
