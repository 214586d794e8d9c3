"""Reads the rows that the functions in Redis keep, and asserts what must hold of them between two calls."""

from collections import Counter
from itertools import pairwise

import numpy as np
from property.inspect_directory import BlockView, Views

from kvpool.core.directory import BlockState
from kvpool.meta.store.pool import Known
from kvpool.meta.store.redis import RedisStore

NIL, ROOT, GHOST = -1, -2, 0
CHUNK_ROWS = 254
BLOCK = np.dtype("V32,<i4,<i4,<i4,<i4,<i4,u1,<u2,<f8,<f8,<f8")
PLACE = np.dtype("<i4,<u2,<u2,<u4,<u8,<u8,<i4,<i4,<i4")
LINKS = ("parent", "first", "following", "previous", "place")
BLOCK_FIELDS = ["hash", *LINKS, "state", "missing", "writer", "used", "held"]
PLACE_FIELDS = ["block", "shard", "segment", "slot", "generation", "checksum", "next", "after", "before"]


class Tables:
    """One namespace's rows, as they are now."""

    def __init__(self, store: RedisStore, known: Known) -> None:
        self._client = store.link._client
        self._prefix = store.epoch.prefix(known.namespace.id)
        self._shards = known.namespace.shards
        self.index = {h: int(row) for h, row in self._client.hgetall(self._prefix + "idx").items()}
        self.blocks = self._rows("b:", BLOCK, BLOCK_FIELDS)
        self.places = self._rows("p:", PLACE, PLACE_FIELDS)
        self.pins = {int(row): float(until) for row, until in self._client.hgetall(self._prefix + "pins").items()}

    def present(self) -> list[int]:
        return [row for row in self.index.values() if self.blocks["state"][row] != GHOST]

    def views(self) -> dict[bytes, BlockView]:
        return {bytes(self.blocks["hash"][row]): self._view(row) for row in self.present()}

    def check_integrity(self) -> None:
        """Links, index, visibility and sums agree with each other."""
        blocks = self.blocks
        for block_hash, row in self.index.items():
            assert bytes(blocks["hash"][row]) == block_hash
            self._check_links(row)
        used = Counter(self.places["segment"][p] for row in self.present() for p in self._places(row))
        for number, raw in self._client.hgetall(self._prefix + "seg").items():
            first, count = np.frombuffer(raw[16:20], "<i4")[0], np.frombuffer(raw[20:28], "<f8")[0]
            listed = list(self._walk(self.places, first, "after"))
            assert len(listed) == count == used.pop(int(number), 0)
            for before, after in pairwise([NIL, *listed]):
                assert self.places["before"][after] == before
        assert not used
        assert int(self._client.hget(self._prefix + "ns", "live") or 0) == len(self.present())

    def _check_links(self, row: int) -> None:
        blocks, children = self.blocks, list(self._walk(self.blocks, self.blocks["first"][row], "following"))
        assert all(blocks["parent"][child] == row for child in children)
        for before, after in pairwise([NIL, *children]):
            assert blocks["previous"][after] == before
        if blocks["state"][row] == GHOST:
            assert children, "a ghost is there for its children"
            assert blocks["parent"][row] == NIL
            return
        parent = blocks["parent"][row]
        assert parent == ROOT or row in self._walk(blocks, blocks["first"][parent], "following")
        above = parent == ROOT or blocks["state"][parent] == BlockState.VISIBLE
        if blocks["state"][row] == BlockState.VISIBLE:
            assert above
            assert not blocks["missing"][row]
        if blocks["state"][row] == BlockState.DORMANT:
            assert blocks["missing"][row] or not above
        self._check_queued(row)

    def _check_queued(self, row: int) -> None:
        """A leaf that may go is found by who looks for one."""
        view = self._view(row)
        if not view.is_leaf or not view.is_committed:
            return
        queue = f"{self._prefix}leaf:{view.home_segment}:{view.rank}"
        assert (
            self._client.zscore(queue, row) is not None or self._client.zscore(self._prefix + "held", row) is not None
        )

    def _view(self, row: int) -> BlockView:
        blocks, places = self.blocks, self._places(row)
        parent = blocks["parent"][row]
        return BlockView(
            BlockState(blocks["state"][row]),
            bytes(blocks["hash"][parent]) if parent >= 0 else b"",
            int(blocks["missing"][row]),
            int(blocks["used"][row]),
            int(max(blocks["held"][row], self.pins.get(row, NIL))),
            int(self.places["segment"][places[-1]]) if places else NIL,
            blocks["first"][row] == NIL,
        )

    def _places(self, row: int) -> list[int]:
        return list(self._walk(self.places, self.blocks["place"][row], "next"))

    def _walk(self, table, row, link):
        while row != NIL:
            yield row
            row = table[link][row]

    def _rows(self, kind: str, layout: np.dtype, fields: list[str]):
        chunks, number = [], 0
        while chunk := self._client.get(f"{self._prefix}{kind}{number}"):
            assert len(chunk) == CHUNK_ROWS * layout.itemsize
            chunks.append(chunk)
            number += 1
        table = np.frombuffer(b"".join(chunks), layout)
        return {name: table[column] for name, column in zip(fields, table.dtype.names, strict=True)}


def all_views(store: RedisStore) -> Views:
    """All entries of all namespaces."""
    return {
        (known.namespace.id, block_hash): view
        for known in store.pool.all_known()
        for block_hash, view in Tables(store, known).views().items()
    }


def check_integrity(store: RedisStore) -> None:
    """Assert the invariants of all namespaces."""
    for known in store.pool.all_known():
        Tables(store, known).check_integrity()
