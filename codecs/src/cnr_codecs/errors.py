"""The errors of cnr_codecs, grouped by what a caller does about them.

CodecError
├── CodecConfigError (ValueError)          the configuration is wrong: change it
├── RowsError (ValueError)                 the rows or arrays handed over don't fit: change the call
└── PayloadError (ValueError)              the bytes are not a payload: they are damaged, or not ours
    └── PayloadLimitError (OverflowError)  larger than the caller allows: raise the limit if it is trusted
"""

from __future__ import annotations


class CodecError(Exception):
    """Base of every error that this package raises on purpose."""


class CodecConfigError(CodecError, ValueError):
    """A codec was asked for by an unknown name or with options that it does not have."""


class RowsError(CodecError, ValueError):
    """Rows, offsets or output arrays have a shape, dtype or order that the call does not take."""


class PayloadError(CodecError, ValueError):
    """A byte string is not a well-formed payload."""


class PayloadLimitError(PayloadError, OverflowError):
    """A payload declares more decoded bytes than the caller allows."""
