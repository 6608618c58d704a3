"""Fresh memory, whole and writable, whatever its size."""

import mmap
from types import SimpleNamespace

import pytest

from deepinfer.kernels.cpu import large_pages
from deepinfer.kernels.cpu.large_pages import PAGE, untouched_bytes


@pytest.mark.parametrize("count", [0, 1, PAGE - 1, PAGE, 3 * PAGE + 5])
def test_fresh_memory_holds_what_is_written_from_end_to_end(count):
    memory = untouched_bytes(count)
    assert memory.shape == (count,)
    memory.fill_(7)
    assert int(memory.sum()) == 7 * count
    if count >= PAGE:
        assert memory.data_ptr() % PAGE == 0


def test_where_there_are_no_large_pages_memory_is_plain(monkeypatch):
    monkeypatch.delattr(large_pages.mmap, "MADV_HUGEPAGE", raising=False)
    memory = untouched_bytes(PAGE)
    assert memory.untyped_storage().nbytes() == PAGE
    assert int(memory.fill_(1).sum()) == PAGE


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no pages of 2 MiB to ask for")
@pytest.mark.parametrize(("answer", "times"), [(0, 0), (-1, 1)], ids=["granted", "refused"])
def test_the_log_says_once_that_the_system_refuses_them(monkeypatch, caplog, answer, times):
    large_pages._say_refused.cache_clear()
    monkeypatch.setattr(large_pages, "_library", lambda: SimpleNamespace(madvise=lambda *_: answer))
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert len(untouched_bytes(3 * PAGE)) == 3 * PAGE
    assert caplog.text.count("small ones") == times
