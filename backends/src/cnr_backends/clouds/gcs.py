"""A backend on Google Cloud Storage."""

from __future__ import annotations

from cnr_backends.clouds.conditional import ConditionalBackend
from cnr_backends.remote import has_create_mode


class GcsBackend(ConditionalBackend):
    """Stores objects on Google Cloud Storage, where a create asks for generation 0: that no object is there."""

    _CREATE = {"mode": "create"}  # noqa: RUF012 - the base declares it as a ClassVar

    def _probe(self) -> None:
        if not has_create_mode(self._fs):
            raise ImportError("this gcsfs has no exclusive writes; install gcsfs 2024.12 or newer")
        super()._probe()

    def _advice(self, error: Exception) -> str:
        return "check the bucket, the credentials (token, or Google's environment) and their permissions"
