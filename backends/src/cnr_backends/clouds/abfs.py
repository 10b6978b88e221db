"""A backend on Azure Blob Storage."""

from __future__ import annotations

from cnr_backends.clouds.conditional import ConditionalBackend


class AbfsBackend(ConditionalBackend):
    """Stores objects on Azure Blob Storage, where a create sends ``If-None-Match: *``."""

    _CREATE = {"overwrite": False}  # noqa: RUF012 - the base declares it as a ClassVar

    def _advice(self, error: Exception) -> str:
        return (
            "check the container, the credentials (account_name, account_key and so on) and their permissions"
        )
