"""The bytes of a chunk: a head, which a checksum proves, then the bodies of segments of rows.

All numbers are little-endian; nothing is padded. The head begins with a header of 24 bytes:

    magic "CNRP" | u8 version, 3 | u8 element type | u16 segments | u32 rows | u32 dim | u64 seal

and goes on with

    u32 bytes of the head | an entry for each segment | the row set of each segment | u32 crc32c of all before it

An entry has 16 bytes:

    u8 scheme | u8 bits | u8 parameter type | u8 row-set kind | u32 count | u32 row-set bytes | u32 body bytes

A body is a segment's parameters and codes. The bodies follow the head in the order of the entries, and the payload ends
with the last one. Segments hold different rows; a payload without segments holds none. Versions 1 and 2, of before the
first release, are refused.
"""
