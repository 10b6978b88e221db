"""The bytes of a chunk: a header, then segments of rows.

All numbers are little-endian; nothing is padded. The header has 24 bytes:

    magic "CNRP" | u8 version | u8 element type | u16 segments | u32 rows | u32 dim | u64 seal

Each segment follows the one before it:

    u8 scheme | u8 bits | u8 parameter type | u8 row-set kind | u32 count | row set | parameters | codes

The payload ends with its last segment. Segments hold different rows; a payload without segments holds none.
"""
