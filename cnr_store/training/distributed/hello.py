"""How ranks find one another in a store that may hold keys of earlier groups and earlier lives of the job."""

from __future__ import annotations

import uuid

from cnr_store.errors import RanksError
from cnr_store.ranks.decisions import MAX_MARGIN_SECONDS, absence, decode, encode, pauses
from cnr_store.ranks.keyvalue import KeyValue

PHASE = "construct"


def agree_on_token(keyvalue: KeyValue, rank: int, world: int, timeout_seconds: float) -> str:
    """Agree on the random name of a new group, on all ranks at once.

    Every rank writes a random greeting, rank 0 writes the token with the greetings it has read. A rank that finds its
    own among these knows that the token is new, and acknowledges it under the token's name: so rank 0 knows that the
    rank is there now.

    Parameters
    ----------
    keyvalue
        Keys that only this function uses.
    rank, world
        The number of this rank, and of all ranks.
    timeout_seconds
        How long a rank waits for the others.

    Raises
    ------
    RanksError
        Ranks did not come in time.
    """
    try:
        if rank == 0:
            return _lead(keyvalue, world, timeout_seconds)
        return _follow(keyvalue, rank, timeout_seconds)
    except RanksError as error:
        raise RanksError(f"{PHASE}: {error}") from error


def _lead(keyvalue: KeyValue, world: int, timeout_seconds: float) -> str:
    token = uuid.uuid4().hex
    answered: dict[str, str] = {}
    missing = set(range(1, world))
    for _ in pauses(timeout_seconds):
        greetings = {str(rank): keyvalue.get(f"greeting/{rank}") for rank in missing}
        fresh = {rank: value.decode() for rank, value in greetings.items() if value is not None}
        if not fresh.items() <= answered.items():
            answered |= fresh
            keyvalue.set("token", encode({"token": token, "greetings": answered}))
        missing = {rank for rank in missing if keyvalue.get(f"{token}/{rank}") is None}
        if not missing:
            break
    error = absence(missing, set(range(world)) - missing, timeout_seconds) if missing else ""
    keyvalue.set(f"{token}/go", encode({"error": error}))
    if error:
        raise RanksError(error)
    return token


def _follow(keyvalue: KeyValue, rank: int, timeout_seconds: float) -> str:
    greeting = uuid.uuid4().hex
    keyvalue.set(f"greeting/{rank}", greeting.encode())
    token = ""
    for _ in range(2):
        for _ in pauses(timeout_seconds + min(MAX_MARGIN_SECONDS, timeout_seconds / 4)):
            value = keyvalue.get(f"{token}/go" if token else "token")
            if value is None:
                continue
            document = decode(value)
            if token:
                if document["error"]:
                    raise RanksError(document["error"])
                return token
            if document["greetings"].get(str(rank)) == greeting:
                token = document["token"]
                keyvalue.set(f"{token}/{rank}", b"here")
        if not token:  # else rank 0 is there, and waits for the others in turn
            break
    raise RanksError(absence([0], [rank], timeout_seconds))
