"""An arena in huge pages: where the kernel gives them, and what happens where it does not."""

from __future__ import annotations

import errno
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from arena_kit import Open

from kvd.arena import ArenaMap, ArenaOwner, os_call
from kvd.arena import owner as owner_module
from kvd.arena.mapping import HUGE_PAGE, Mapping
from kvd.errors import ArenaError

MIB = 1 << 20
SIZE = 16 * MIB
COLLAPSE = Mapping.collapse


@pytest.fixture
def huge() -> None:
    """A kernel that gives huge pages."""
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    try:
        os.posix_fallocate(fd, 0, HUGE_PAGE)
        problem = Mapping(fd, HUGE_PAGE, writable=True).collapse(0, HUGE_PAGE)
    finally:
        os.close(fd)
    if problem:
        pytest.skip(f"no huge pages for shared memory: {os.strerror(problem)}")


@pytest.fixture
def gives(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """gives(n, errno): a kernel that has n bytes in huge pages, and refuses from then on."""

    def give(most: int, number: int) -> None:
        left = [most]

        def collapse(self: Mapping, offset: int, length: int) -> int:
            now = min(left[0], length)
            left[0] -= now
            return (COLLAPSE(self, offset, now) if now else 0) or (number if now < length else 0)

        monkeypatch.setattr(Mapping, "collapse", collapse)

    return give


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on there is memory for single pages only."""
    allocate = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        if length > 1:
            raise OSError(errno.ENOSPC, "full")
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)


def whole(owner: ArenaOwner) -> bool:
    while not owner.reserve_step():
        pass
    owner.prefault(0, owner.size)
    return owner.reserved == owner.size


def ranges(path: Path) -> list[int]:
    """Sizes of what this process has mapped of a file."""
    return [
        int(m[2], 16) - int(m[1], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(path)) and (m := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line))
    ]


@pytest.mark.usefixtures("huge")
def test_a_new_arena_lies_in_huge_pages(open_arena: Open, base: Path) -> None:
    owner = open_arena(SIZE)
    assert whole(owner)
    assert (owner.huge_bytes(), owner.huge_problem) == (SIZE, "")
    assert os.fstat(owner.fd_arena).st_blocks * 512 == SIZE
    assert not owner.view.obj.any()
    assert ranges(base) == [SIZE]


@pytest.mark.usefixtures("huge")
def test_what_is_no_whole_huge_page_stays_small(open_arena: Open) -> None:
    owner = open_arena(SIZE + MIB)
    assert whole(owner)
    assert owner.why_small == ""  # not counted yet
    assert (owner.huge_bytes(), owner.huge_problem) == (SIZE, "")
    assert owner.why_small == "the last 1 MiB are less than such a page"
    assert os.fstat(owner.fd_arena).st_blocks * 512 == SIZE + MIB


@pytest.mark.usefixtures("huge")
def test_an_adopted_arena_is_put_into_huge_pages_and_keeps_its_bytes(
    open_arena: Open, base: Path
) -> None:
    owner = open_arena(SIZE, huge_pages="never")
    assert whole(owner)
    assert (owner.huge_bytes(), owner.huge_problem) == (0, "")
    assert owner.why_small == "arena.huge_pages is never"
    reader = ArenaMap(owner.fd_arena, owner.fd_table)
    data = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    owner.view[:] = data.data
    owner.close()
    again = open_arena(SIZE)
    assert again.adopted and whole(again)
    assert again.huge_bytes() == SIZE and again.why_small == ""
    assert np.array_equal(np.frombuffer(again.view, np.uint8), data)
    # who had it mapped before has the same memory still
    assert np.array_equal(np.frombuffer(reader.view_at(0, SIZE), np.uint8), data)
    again.view[:4] = b"anew"
    assert bytes(reader.view_at(0, 4)) == b"anew"
    reader.close()


@pytest.mark.usefixtures("huge")
def test_required_huge_pages_are_there_at_the_first_start_and_the_next(open_arena: Open) -> None:
    """K117: exactly enough: there is no refusal."""
    first = open_arena(SIZE, huge_pages="require")
    assert first.reserved == SIZE
    first.close()
    assert open_arena(SIZE, huge_pages="require").huge_bytes() == SIZE


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.EINVAL, f"this kernel, {platform.release()}, can't"),
        (errno.ENOMEM, "no memory in one piece is free"),
        (errno.EBUSY, "the memory cgroup has no room"),
        (errno.EAGAIN, "somebody keeps the pages where they are"),
        (errno.EPERM, "Operation not permitted"),
    ],
)
def test_no_huge_pages_are_no_reason_to_stop_unless_they_are_required(
    open_arena: Open, base: Path, gives: Callable[[int, int], None], number: int, why: str
) -> None:
    """K117: none are there: required, a refusal with numbers; preferred, small pages."""
    gives(0, number)
    with pytest.raises(ArenaError) as refused:
        open_arena(SIZE, huge_pages="require")
    said = str(refused.value)
    assert f"of the first {SIZE} bytes of arena {base} only 0 are in huge pages: {why}" in said
    assert said.endswith("or make it prefer")
    assert list(base.parent.glob(base.name + "*")) == []
    owner = open_arena(SIZE, huge_pages="prefer")
    assert whole(owner)
    assert owner.huge_bytes() == 0 and owner.huge_problem.startswith(why)
    assert owner.why_small == owner.huge_problem
    owner.view[:] = bytes([7]) * SIZE  # no SIGBUS
    assert owner.view[SIZE - 1] == 7


@pytest.mark.usefixtures("huge")
def test_huge_pages_that_run_out_leave_what_was_reserved_in_use(
    open_arena: Open, gives: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """K117: half of them are there: required, the arena ends where they do; preferred, it goes on
    in small pages."""
    monkeypatch.setattr(owner_module, "RESERVE_STEP", SIZE // 4)
    gives(SIZE // 2 + SIZE // 4, errno.ENOMEM)  # the first quarter is asked for twice
    owner = open_arena(SIZE, huge_pages="require")
    assert not owner.reserve_step()
    with pytest.raises(ArenaError, match=rf"the first {SIZE * 3 // 4} bytes .* only {SIZE // 2} "):
        owner.reserve_step()
    assert owner.reserved == owner.huge_bytes() == SIZE // 2
    assert os.fstat(owner.fd_arena).st_blocks * 512 == SIZE // 2  # nothing is had and not used
    owner.view[: SIZE // 2] = bytes([7]) * (SIZE // 2)
    owner.destroy()
    gives(SIZE // 2, errno.ENOMEM)
    other = open_arena(SIZE, huge_pages="prefer")
    assert whole(other)
    assert other.huge_bytes() == SIZE // 2
    assert other.huge_problem.startswith("no memory in one piece is free")


@pytest.mark.usefixtures("huge")
def test_a_problem_that_passed_is_not_told(
    open_arena: Open, gives: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gives(0, errno.EAGAIN)
    owner = open_arena(SIZE)
    assert owner.huge_problem
    monkeypatch.undo()
    assert whole(owner)
    assert (owner.huge_bytes(), owner.huge_problem) == (SIZE, "")


@pytest.mark.parametrize("fails", [False, True])
def test_what_lies_in_an_adopted_arena_that_is_reserved_anew_stays(
    open_arena: Open, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """An arena from which somebody took memory away is reserved from its beginning."""
    owner = open_arena(SIZE)
    data = np.random.default_rng(2).integers(1, 256, SIZE - HUGE_PAGE, np.uint8)
    owner.view[: data.size] = data.data
    os_call.punch_hole(owner.fd_arena, data.size, HUGE_PAGE)
    owner.close()
    monkeypatch.setattr(owner_module, "RESERVE_STEP", SIZE // 4)
    again = open_arena(SIZE)
    assert again.adopted and again.reserved == SIZE // 4
    if fails:
        fill(monkeypatch)
        with pytest.raises(ArenaError, match="no memory for arena"):
            again.reserve_step()
    else:
        assert whole(again)
    assert np.array_equal(np.frombuffer(again.view[: data.size], np.uint8), data)


def test_memory_that_was_had_in_vain_is_given_back(
    open_arena: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_module, "RESERVE_STEP", SIZE // 4)
    owner = open_arena(SIZE)
    fill(monkeypatch)
    with pytest.raises(ArenaError, match="no memory for arena"):
        owner.reserve_step()
    assert owner.reserved == os.fstat(owner.fd_arena).st_blocks * 512 == SIZE // 4
    if owner.huge_bytes() == SIZE // 4:
        assert owner.why_small == "there is no memory for the rest"


@pytest.mark.parametrize("size", [4096, HUGE_PAGE - 4096, HUGE_PAGE, 3 * HUGE_PAGE + 4097])
def test_a_mapping_begins_where_a_huge_page_may_and_leaves_nothing_mapped(size: int) -> None:
    def mapped() -> int:
        return sum(
            int(end, 16) - int(begin, 16)
            for begin, end in re.findall(
                r"^([0-9a-f]+)-([0-9a-f]+) ---p 00000000 00:00 0 *$",
                Path("/proc/self/maps").read_text(),
                re.MULTILINE,
            )
        )

    before = mapped()
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, size)
    mapping = Mapping(fd, size, writable=True)
    os.close(fd)
    assert size < HUGE_PAGE or mapping.address % HUGE_PAGE == 0
    assert mapped() == before  # what was reserved to find the place is given back
    mapping.bytes[:] = 5
    assert mapping.bytes.sum() == 5 * size
    mapping.close()
    assert mapped() == before


@pytest.mark.parametrize(
    ("offset", "length"), [(0, HUGE_PAGE - 1), (1, HUGE_PAGE), (-1, 5), (SIZE, HUGE_PAGE), (0, 0)]
)
def test_a_range_without_a_whole_huge_page_is_left_alone(
    open_arena: Open, offset: int, length: int
) -> None:
    owner = open_arena(SIZE, huge_pages="never")
    assert whole(owner)
    mapping = Mapping(owner.fd_arena, SIZE, writable=False)
    assert mapping.collapse(offset, length) == 0
    assert owner.huge_bytes() == 0
