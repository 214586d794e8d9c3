"""What the functions in Redis know of one block, as people are told it."""

import json
from collections.abc import Callable
from typing import Any

from kvpool.core.directory import Cause, Explanation, MissReason
from kvpool.core.directory.tombstones import Tombstone

Judge = Callable[[bytes], MissReason | None]

_MICRO = 1e-6


def explanation(document: bytes, judge: Judge, node_of: Callable[[int], str]) -> Explanation:
    """The explanation in the document that `kvpool_explain` makes; ``judge`` reads its reasons."""
    said: dict[str, Any] = json.loads(document)
    reason = judge(said["reason"].encode())
    now_us = int(said["now"])
    if "left" in said:
        return _left(said["left"], reason, now_us, node_of)
    if "where" not in said:
        return Explanation(reason)
    return Explanation(
        reason,
        nodes=tuple(dict.fromkeys(node_of(number) for number in said["where"])),
        ago_s=(now_us - int(said["used"])) * _MICRO,
        owner=said["owner"],
        deadline_s=(float(said["deadline"]) - now_us) * _MICRO if said["deadline"] else None,
        missing=bytes(said.get("missing", ())),
        missing_reason=judge(said["missing_reason"].encode()) if "missing_reason" in said else None,
    )


def _left(left: list[Any], reason: MissReason | None, now_us: int, node_of: Callable[[int], str]) -> Explanation:
    _, why, cause, number, at_us, last_use_us = left
    tombstone = Tombstone(MissReason(why), int(at_us), Cause(cause) if cause else None)
    node = node_of(number) if number >= 0 else ""
    return Explanation(
        reason,
        cause=tombstone.cause,
        nodes=(node,) if node else (),
        ago_s=(now_us - tombstone.at_us) * _MICRO,
        idle_s=max(0.0, (tombstone.at_us - int(last_use_us)) * _MICRO),
    )
