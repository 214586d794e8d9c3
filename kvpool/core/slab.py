"""Which pages of a segment are free: best fit over extents that merge with their neighbours.

Blocks of one size never fragment it (a freed extent fits the next block exactly); of mixed sizes, best fit keeps the
large extents whole as long as it can.
"""

from bisect import bisect_left, insort


class Slab:
    """Free extents of ``pages`` pages; an extent is named by its first page."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.free_pages = 0
        self._length: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._starts_by_length: dict[int, set[int]] = {}
        self._lengths: list[int] = []
        self.free(0, pages)

    @property
    def largest_free(self) -> int:
        """Pages in the largest free extent."""
        return self._lengths[-1] if self._lengths else 0

    def allocate(self, pages: int) -> int | None:
        """First page of an extent of ``pages``, or None when no free extent is that long."""
        fit = bisect_left(self._lengths, pages)
        if fit == len(self._lengths):
            return None
        length = self._lengths[fit]
        starts = self._starts_by_length[length]
        starts.add(start := starts.pop())  # unlike iterating, pop does not walk over what was taken before
        self._remove(start, length)
        if length > pages:
            self._add(start + pages, length - pages)
        return start

    def allocate_run(self, pages: int, count: int) -> list[int]:
        """First pages of up to ``count`` extents of ``pages`` each, side by side if that can be."""
        start = self.allocate(pages * count)
        if start is not None:
            return list(range(start, start + pages * count, pages))
        starts: list[int] = []
        while len(starts) < count and (start := self.allocate(pages)) is not None:
            starts.append(start)
        return starts

    def take(self, start: int, pages: int) -> bool:
        """Take exactly these pages, as a restart does for the slots it finds; False when they are not all free."""
        # Newest first: a restart takes slots in page order, and what is left of the tail was added last.
        for free_start in reversed(self._length):
            length = self._length[free_start]
            if free_start <= start and start + pages <= free_start + length:
                self._remove(free_start, length)
                if free_start < start:
                    self._add(free_start, start - free_start)
                if start + pages < free_start + length:
                    self._add(start + pages, free_start + length - start - pages)
                return True
        return False

    def free(self, start: int, pages: int) -> None:
        """Give pages back; the caller owned exactly them."""
        end = start + pages
        before = self._start_by_end.get(start)
        if before is not None:
            self._remove(before, start - before)
            start = before
        after = self._length.get(end)
        if after is not None:
            self._remove(end, after)
            end += after
        self._add(start, end - start)

    def check_integrity(self) -> None:
        """Assert that the extents are disjoint, merged, and add up."""
        end = -1
        for start in sorted(self._length):
            assert start > end, "free neighbours are merged and do not overlap"
            end = start + self._length[start]
        assert end <= self.pages
        assert sum(self._length.values()) == self.free_pages
        assert sorted(self._length.values()) == sorted(n for n, s in self._starts_by_length.items() for _ in s)

    def _add(self, start: int, length: int) -> None:
        self.free_pages += length
        self._length[start] = length
        self._start_by_end[start + length] = start
        starts = self._starts_by_length.get(length)
        if starts is None:
            starts = self._starts_by_length[length] = set()
            insort(self._lengths, length)
        starts.add(start)

    def _remove(self, start: int, length: int) -> None:
        self.free_pages -= length
        del self._length[start]
        del self._start_by_end[start + length]
        starts = self._starts_by_length[length]
        starts.discard(start)
        if not starts:
            del self._starts_by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
