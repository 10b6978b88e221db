"""torch.distributed.checkpoint on a store: `Writer` and `Reader` for its ``save`` and ``load``, and an import."""

from cnr_store.dcp.importing import import_checkpoint
from cnr_store.dcp.reader import Reader
from cnr_store.dcp.writer import Writer

__all__ = ["Reader", "Writer", "import_checkpoint"]
