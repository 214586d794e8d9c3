"""The forest of chains: who is whose parent, and which blocks are visible.

Keeps the visible blocks prefix-closed: a block is visible exactly when it is complete and its parent is visible or it
is a root. Blocks whose parent is not in the table wait under the parent's hash and wake when it appears.
"""

from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvpool.core.directory.journal import Journal
from kvpool.core.directory.table import NIL, ROOT, BlockState, BlockTable, Rows, view
from kvpool.core.eviction.use import inherited

Index = dict[bytes, int]

WIDE = 32
"""From so many rows on numpy is faster than one by one."""


class Chains:
    """Parent links, visibility and the index by hash of each namespace.

    Args:
        blocks: The rows; this class owns their links and states.
        on_change: Called with a row that may have become evictable or changed its eviction class.
        on_fold: Called with a row and the ancestor that takes over its holds, or a negative number without one.

    Attributes:
        journal: Where it is written down what becomes visible and what ceases to be; nowhere by default.
    """

    def __init__(
        self, blocks: BlockTable, on_change: Callable[[int], None], on_fold: Callable[[int, int], None]
    ) -> None:
        self.blocks = blocks
        self.journal: Journal | None = None
        self.indexes: list[Index] = []
        self._on_change = on_change
        self._on_fold = on_fold
        self.waiting: list[dict[bytes, set[int]]] = []
        self._waits_for: dict[int, bytes] = {}

    def add_namespace(self) -> int:
        """Number of a new, empty namespace."""
        self.indexes.append({})
        self.waiting.append({})
        return len(self.indexes) - 1

    def insert(self, namespace: int, block_hash: bytes, parent_hash: bytes, shards: int, now_us: int) -> int:
        """Add an in-flight block below ``parent_hash`` (empty: a root) and adopt the blocks that waited for it."""
        row = self.blocks.add(block_hash, namespace, shards, now_us)
        self.indexes[namespace][block_hash] = row
        self._attach(row, namespace, parent_hash)
        for orphan in sorted(self.waiting[namespace].pop(block_hash, ())):
            del self._waits_for[orphan]
            self._link(orphan, row)
        return row

    def insert_run(self, namespace: int, hashes: list[bytes], parent_hash: bytes, shards: int, now_us: int) -> Rows:
        """`insert` for new blocks that follow one another below ``parent_hash``."""
        if self.waiting[namespace]:
            above = [parent_hash, *hashes]
            return [self.insert(namespace, h, above[i], shards, now_us) for i, h in enumerate(hashes)]
        blocks = self.blocks
        rows = blocks.add_run(hashes, namespace, shards, now_us)
        self.indexes[namespace].update(zip(hashes, rows, strict=True))
        self._attach(rows[0], namespace, parent_hash)
        if isinstance(rows, range):
            blocks.parent[rows.start + 1 : rows.stop] = array("i", rows[:-1])
            blocks.first_child[rows.start : rows.stop - 1] = array("i", rows[1:])
            return rows
        for above_row, row in pairwise(rows):
            blocks.parent[row] = above_row
            blocks.first_child[above_row] = row
            blocks.next_sibling[row] = blocks.previous_sibling[row] = NIL
        return rows

    def insert_forest(
        self, namespace: int, hashes: list[bytes], parent_hashes: list[bytes], above: NDArray[np.int32], now_us: int
    ) -> NDArray[np.int32]:
        """`insert` for many new blocks of one shard that no block waits for; their rows.

        ``above`` is the index of each one's parent among ``hashes``, or NIL: it may follow its children, but must not
        lie below them.
        """
        index = self.indexes[namespace]
        rows = np.array(self.blocks.add_run(hashes, namespace, 1, now_us), np.int32)
        index.update(zip(hashes, rows.tolist(), strict=True))
        parents = np.where(above >= 0, rows[above], NIL).astype(np.int32)
        for i in np.flatnonzero(above < 0).tolist():
            parent_hash = parent_hashes[i]
            parents[i] = index.get(parent_hash, NIL) if parent_hash else ROOT
            if parents[i] == NIL:
                self._wait(int(rows[i]), namespace, parent_hash)
        view(self.blocks.parent)[rows] = parents
        self._link_all(rows[parents >= 0], parents[parents >= 0])
        return rows

    def complete_forest(self, rows: NDArray[np.int32], top: NDArray[np.int32]) -> None:
        """`complete` for all blocks of `insert_forest`; ``top`` is the index of the highest one above each."""
        blocks = self.blocks
        parents = view(blocks.parent)[rows[top]]
        above = view(blocks.state)[np.maximum(parents, 0)]
        is_visible = (parents == ROOT) | ((parents >= 0) & (above == BlockState.VISIBLE))
        view(blocks.missing_shards)[rows] = 0
        view(blocks.state)[rows] = np.where(is_visible, BlockState.VISIBLE, BlockState.DORMANT)
        if self.journal is not None:
            self._note_trees(rows[(top == np.arange(len(top))) & is_visible].tolist(), self.journal)
        for row in rows[view(blocks.first_child)[rows] == NIL].tolist():
            self._on_change(row)

    def would_loop(self, namespace: int, hashes: list[bytes], parent_hash: bytes) -> bool:
        """Whether ``parent_hash`` lies below one of the new ``hashes``.

        No engine makes such hashes; but a ring has no leaf, so nothing could ever evict it.
        """
        waiting = self.waiting[namespace]
        if not waiting or not any(block_hash in waiting for block_hash in hashes):
            return False
        row = self.indexes[namespace].get(parent_hash, NIL)
        while row >= 0 and self.blocks.parent[row] >= 0:
            row = self.blocks.parent[row]
        return self._waits_for.get(row) in hashes

    def complete(self, row: int) -> None:
        """All shards are committed: the block turns visible with what waits below it, or dormant."""
        if self._parent_is_visible(row):
            self._wake(row)
        else:
            self._set_states([row], BlockState.DORMANT)

    def doze(self, *rows: int) -> None:
        """Make blocks of one parent dormant, and the visible part of their subtrees with them.

        Their last use and holds pass to the parent: leases on them cover what is still visible above, and would be
        lost for it if the block went later.
        """
        heir, states = self.blocks.parent[rows[0]], self.blocks.state
        level = list(rows)
        while level:
            below = self._below([row for row in level if states[row] == BlockState.VISIBLE])
            self._fold_all(level, heir)
            if self.journal is not None:
                self.journal.removed([row for row in level if states[row] == BlockState.VISIBLE])
            self._set_states(level, BlockState.DORMANT)
            level = [child for child in below if states[child] == BlockState.VISIBLE]

    def remove(self, row: int) -> None:
        """Take the block out; its children wait for its hash, and its last use and hold pass to its parent."""
        blocks = self.blocks
        namespace, block_hash, parent = blocks.namespace[row], blocks.hash[row], blocks.parent[row]
        children = list(self.children(row))
        blocks.first_child[row] = NIL
        awake = [child for child in children if blocks.state[child] == BlockState.VISIBLE]
        if awake:
            self.doze(*awake)
        if self.journal is not None and blocks.state[row] == BlockState.VISIBLE:
            self.journal.removed([row])
        for child in children:
            self._wait(child, namespace, block_hash)
        self.fold(row, parent)
        if parent >= 0:
            if blocks.use[row] and blocks.state[row] != BlockState.IN_FLIGHT:
                blocks.use[parent] = inherited(blocks.use[parent], blocks.use[row])
            self._unlink(row, parent)
        elif parent == NIL:
            self._stop_waiting(row, namespace)
        del self.indexes[namespace][block_hash]
        blocks.free(row)
        if parent >= 0 and blocks.first_child[parent] == NIL:
            self._on_change(parent)

    def fold(self, row: int, ancestor: int) -> None:
        """Keep the latest last use and the longest hold of a block that goes in its ancestor, if it has one here."""
        blocks = self.blocks
        if ancestor >= 0:
            blocks.last_use_us[ancestor] = max(blocks.last_use_us[ancestor], blocks.last_use_us[row])
            blocks.held_until_us[ancestor] = max(blocks.held_until_us[ancestor], blocks.held_until_us[row])
        self._on_fold(row, ancestor)

    def children(self, row: int) -> Iterator[int]:
        """Rows whose parent is ``row``, the newest first."""
        child = self.blocks.first_child[row]
        while child != NIL:
            yield child
            child = self.blocks.next_sibling[child]

    def parent_hash(self, row: int) -> bytes:
        """Hash of the parent, present or not; empty for a root."""
        parent = self.blocks.parent[row]
        if parent == ROOT:
            return b""
        return self.blocks.hash[parent] if parent >= 0 else self._waits_for[row]

    def check_integrity(self) -> None:
        """Assert that links, index, waiting lists and visibility agree with each other."""
        blocks = self.blocks
        for namespace, index in enumerate(self.indexes):
            for block_hash, row in index.items():
                assert blocks.hash[row] == block_hash
                assert blocks.namespace[row] == namespace
                assert blocks.state[row] != BlockState.FREE
                self._check_row(row, namespace)
            for parent_hash, orphans in self.waiting[namespace].items():
                assert parent_hash not in index
                assert orphans
                assert all(self._waits_for[orphan] == parent_hash for orphan in orphans)
        assert blocks.live == sum(len(index) for index in self.indexes)

    def _check_row(self, row: int, namespace: int) -> None:
        blocks = self.blocks
        parent = blocks.parent[row]
        assert (parent == NIL) == (row in self._waits_for)
        if parent >= 0:
            assert row in self.children(parent)
            assert blocks.namespace[parent] == namespace
        if blocks.state[row] == BlockState.VISIBLE:
            assert blocks.missing_shards[row] == 0
            assert self._parent_is_visible(row), "a visible block's parent is visible"
        if blocks.state[row] == BlockState.DORMANT and blocks.missing_shards[row] == 0:
            assert not self._parent_is_visible(row), "a complete block wakes with its parent"

    def _wake(self, row: int) -> None:
        blocks = self.blocks
        states, missing = blocks.state, blocks.missing_shards
        stack = [row]
        while stack:
            if len(stack) >= WIDE:
                if self.journal is not None:
                    self.journal.stored_all(stack)
                self._set_states(stack, BlockState.VISIBLE)
                below = self._below(stack)
                stack = [child for child in below if states[child] == BlockState.DORMANT and not missing[child]]
                continue
            row = stack.pop()
            states[row] = BlockState.VISIBLE
            if self.journal is not None:
                self.journal.stored(row)
            child = blocks.first_child[row]
            if child == NIL:
                self._on_change(row)
            while child != NIL:
                if states[child] == BlockState.DORMANT and not missing[child]:
                    stack.append(child)
                child = blocks.next_sibling[child]

    def _note_trees(self, tops: list[int], journal: Journal) -> None:
        """Write down that these and all below them, new ones all, are visible."""
        stack, found = tops, []
        while stack:
            row = stack.pop()
            found.append(row)
            stack.extend(self.children(row))
        if found:
            journal.stored_all(found)

    def _below(self, rows: list[int]) -> list[int]:
        """The children of all ``rows``: many at a time, since a prompt that all share may have a million below it."""
        if len(rows) < WIDE:
            return [child for row in rows for child in self.children(row)]
        first, following = view(self.blocks.first_child), view(self.blocks.next_sibling)
        found: list[int] = []
        heads = first[rows]
        heads = heads[heads != NIL]
        while len(heads) >= WIDE:
            found += heads.tolist()
            heads = following[heads]
            heads = heads[heads != NIL]
        for head in heads.tolist():
            child = head
            while child != NIL:
                found.append(child)
                child = self.blocks.next_sibling[child]
        return found

    def _fold_all(self, rows: list[int], ancestor: int) -> None:
        """`fold` for each, none of which is a leaf's heir."""
        if len(rows) >= WIDE and ancestor >= 0:
            blocks = self.blocks
            for column in (blocks.last_use_us, blocks.held_until_us):
                column[ancestor] = max(column[ancestor], int(view(column)[rows].max()))
            for row in rows:
                self._on_fold(row, ancestor)
            return
        for row in rows:
            self.fold(row, ancestor)

    def _set_states(self, rows: list[int], state: BlockState) -> None:
        states, first_child = self.blocks.state, self.blocks.first_child
        for row in rows:
            states[row] = state
            if first_child[row] == NIL:
                self._on_change(row)

    def _parent_is_visible(self, row: int) -> bool:
        parent = self.blocks.parent[row]
        return parent == ROOT or (parent >= 0 and self.blocks.state[parent] == BlockState.VISIBLE)

    def _attach(self, row: int, namespace: int, parent_hash: bytes) -> None:
        if not parent_hash:
            self.blocks.parent[row] = ROOT
            return
        parent = self.indexes[namespace].get(parent_hash, NIL)
        if parent == NIL:
            self._wait(row, namespace, parent_hash)
        else:
            self._link(row, parent)

    def _link(self, row: int, parent: int) -> None:
        blocks = self.blocks
        eldest = blocks.first_child[parent]
        blocks.parent[row] = parent
        blocks.next_sibling[row] = eldest
        blocks.previous_sibling[row] = NIL
        if eldest != NIL:
            blocks.previous_sibling[eldest] = row
        blocks.first_child[parent] = row

    def _link_all(self, rows: NDArray[np.int32], parents: NDArray[np.int32]) -> None:
        """`_link` for each: the last one of a parent is its first child."""
        if not len(rows):
            return
        blocks = self.blocks
        order = np.argsort(parents, kind="stable")[::-1]
        rows, parents = rows[order], parents[order]
        begins = np.append(True, parents[1:] != parents[:-1])
        ends = np.append(begins[1:], True)
        eldest = view(blocks.first_child)[parents[ends]]
        view(blocks.next_sibling)[rows] = np.append(rows[1:], np.int32(NIL))
        view(blocks.next_sibling)[rows[ends]] = eldest
        view(blocks.previous_sibling)[rows] = np.append(np.int32(NIL), rows[:-1])
        view(blocks.previous_sibling)[rows[begins]] = NIL
        view(blocks.previous_sibling)[eldest[eldest != NIL]] = rows[ends][eldest != NIL]
        view(blocks.first_child)[parents[begins]] = rows[begins]

    def _unlink(self, row: int, parent: int) -> None:
        blocks = self.blocks
        before, after = blocks.previous_sibling[row], blocks.next_sibling[row]
        if before == NIL:
            blocks.first_child[parent] = after
        else:
            blocks.next_sibling[before] = after
        if after != NIL:
            blocks.previous_sibling[after] = before

    def _wait(self, row: int, namespace: int, parent_hash: bytes) -> None:
        self.blocks.parent[row] = NIL
        self.waiting[namespace].setdefault(parent_hash, set()).add(row)
        self._waits_for[row] = parent_hash

    def _stop_waiting(self, row: int, namespace: int) -> None:
        parent_hash = self._waits_for.pop(row)
        orphans = self.waiting[namespace][parent_hash]
        orphans.discard(row)
        if not orphans:
            del self.waiting[namespace][parent_hash]
