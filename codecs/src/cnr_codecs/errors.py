"""The errors of cnr_codecs, grouped by what a caller does about them.

CodecError
├── CodecConfigError (ValueError)          the configuration is wrong: change it
├── RowsError (ValueError)                 the rows or arrays don't fit the call: change the call
└── PayloadError (ValueError)              the bytes are not a payload: they are damaged or foreign
    ├── PayloadLimitError (OverflowError)  it decodes to more bytes than allowed: raise the limit if you trust it
    ├── ParentError                        rows relative to it, or its own, don't fit those of another payload
    └── UnsupportedPayloadError            a newer release wrote it: upgrade
"""

from __future__ import annotations


class CodecError(Exception):
    """Base of the errors that this package raises."""


class CodecConfigError(CodecError, ValueError):
    """A codec's name is unknown, or the codec doesn't take the options."""


class RowsError(CodecError, ValueError):
    """Rows, offsets or output arrays have a shape, dtype or order that the call doesn't take."""


class PayloadError(CodecError, ValueError):
    """A byte string is not a well-formed payload."""


class PayloadLimitError(PayloadError, OverflowError):
    """A payload decodes to more bytes than the caller allows."""


class ParentError(PayloadError):
    """Rows that are relative to others do not fit these."""


class UnsupportedPayloadError(PayloadError):
    """A payload is of a version, or holds segments, that newer releases write."""
