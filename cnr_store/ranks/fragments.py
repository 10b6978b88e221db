"""stub"""
from dataclasses import dataclass
from typing import Any
@dataclass
class EncodedChunk:
    write: int
    shard: int
    slot: int
    payload: Any
@dataclass
class RawRows:
    write: int
    shard: int
    slot: int
    first_column: int
    offsets: Any
    data: Any
    def values(self, dtype): ...
Fragment = EncodedChunk | RawRows
def pack(fragments): ...
def unpack(data): ...
