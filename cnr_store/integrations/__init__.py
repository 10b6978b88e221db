"""Integrations with training frameworks; each module needs its framework."""
