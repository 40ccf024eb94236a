"""Huge pages for the memory of a model.

Weights and activations that lie in pages of 4 KiB are slow to reach for as long as a process lives: the CPU's table of
addresses (TLB) does not hold as many, and where pages happen to lie decides which of them displace each other in its
caches. Linux makes pages of 2 MiB of memory that is in use already, whoever allocated it: madvise(2), `MADV_COLLAPSE`,
since Linux 6.1.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HUGE_BYTES = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_NUM_TRIED = 4
"""Huge pages that are asked for to see whether there are any: one more than those that lie in the memory as a whole."""
_MIN_FILLED = 0.9
"""Share of a huge page that must be in memory before, so that a process grows by a tenth at most."""
_PAUSES_S = (0.0, 1e-3, 4e-3)
"""Before each further attempt at a huge page, while Linux answers that something else holds a part of it for a moment:
`EAGAIN`."""
_MAPS = Path("/proc/self/maps")
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(?:\[heap\])?$")
"""A line for memory that belongs to no file: proc_pid_maps(5)."""


@dataclass(frozen=True)
class HugePages:
    """What was asked of Linux, and what it gave."""

    asked_bytes: int = 0
    """Memory that could be in huge pages."""
    got_bytes: int = 0
    """Memory that is."""

    def __str__(self) -> str:
        return f"{self.got_bytes >> 20} of {self.asked_bytes >> 20} MiB in huge pages"


def return_freed_memory() -> None:
    """Gives back to the system what the C library keeps of freed memory, where it can: glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def try_huge_pages() -> HugePages:
    """What Linux gives of a few megabytes here: a kernel, a container or a sandbox may not have them."""
    memory = NewMemory()
    with mmap.mmap(-1, _NUM_TRIED * _HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as tried:
        tried.write(bytes(len(tried)))
        return memory.collapse()


class NewMemory:
    """The memory that a process fills from now on.

    What other threads fill meanwhile belongs to it, too; that it is in huge pages does them no harm.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        return_freed_memory()  # what is made of it later is to look new
        self._before = set(self._filled_pages(1 - _MIN_FILLED))

    def collapse(self) -> HugePages:
        """Puts all of it into huge pages; changes nothing where Linux cannot."""
        return_freed_memory()  # it need not be moved
        pages = [page for page in self._filled_pages(_MIN_FILLED) if page not in self._before]
        got = sum(map(self._collapse, pages))
        return HugePages(len(pages) * _HUGE_BYTES, got * _HUGE_BYTES)

    def _filled_pages(self, share: float) -> Iterator[int]:
        """Yields the addresses of huge pages of which a share is in memory."""
        for start, end in _anonymous_memory():
            for page in range(-(-start // _HUGE_BYTES) * _HUGE_BYTES, end - _HUGE_BYTES + 1, _HUGE_BYTES):
                if self._filled_share(page) >= share:
                    yield page

    def _filled_share(self, page: int) -> float:
        states = (ctypes.c_ubyte * (_HUGE_BYTES // mmap.PAGESIZE))()
        if self._libc.mincore(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_BYTES), states) != 0:
            return 0.0
        return bytes(states).count(1) / len(states)

    def _collapse(self, page: int) -> bool:
        place, size = ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_BYTES)
        self._libc.madvise(place, size, _MADV_HUGEPAGE)  # so that Linux leaves it as it is
        for pause_s in (*_PAUSES_S, 0.0):
            if self._libc.madvise(place, size, _MADV_COLLAPSE) == 0:
                return True
            if ctypes.get_errno() != errno.EAGAIN:
                break
            time.sleep(pause_s)
        return False


def _anonymous_memory() -> list[tuple[int, int]]:
    """The first and the last address of memory that belongs to no file; none where the system does not tell."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return []
    found = map(_ANONYMOUS.match, lines)
    return [(int(match[1], 16), int(match[2], 16)) for match in found if match]
