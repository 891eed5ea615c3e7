"""The page pool: every page is free, idle or held, and idle ones are reused oldest first."""

import numpy as np
import pytest

from serving.engine.pages import PagePool, page_key, root_key

KEYS = [page_key(b"", np.arange(i, i + 4)) for i in range(5)]


def test_held_pages_are_shared_and_freed_by_the_last_holder():
    pool = PagePool(3, 4)
    pages = [pool.take(), pool.take()]
    for key, page in zip(KEYS, pages, strict=False):
        pool.keep(key, page)
    assert pool.find(KEYS) == pages and pool.n_held == 2
    pool.release(pages)
    assert pool.n_held == 2
    pool.release(pages)
    assert pool.n_held == 0 and pool.n_available == 3
    with pytest.raises(ValueError, match="released twice"):
        pool.release(pages)


def test_the_least_recently_used_page_makes_room():
    pool = PagePool(2, 4)
    first, second = pool.take(), pool.take()
    pool.keep(KEYS[0], first)
    pool.keep(KEYS[1], second)
    pool.release([first])
    pool.release([second])
    pool.release(pool.find(KEYS[:1]))  # used again
    assert pool.take() == second
    assert pool.find(KEYS[1:2]) == [] and pool.find(KEYS[:1]) == [first]
    assert pool.take() is None


def test_forgotten_pages_serve_nobody():
    pool = PagePool(2, 4)
    page = pool.take()
    pool.keep(KEYS[0], page)
    pool.forget()
    assert pool.find(KEYS) == []
    pool.release([page])
    assert pool.n_available == 2 and pool._free


def test_pages_of_some_weights_can_be_forgotten_alone():
    pool = PagePool(2, 4)
    pages = [pool.take(), pool.take()]
    for key, page, root in zip(KEYS, pages, (b"old", b"new"), strict=False):
        pool.keep(key, page, root)
    pool.release(pages[:1])
    pool.forget(but={b"new"})
    assert pool.find(KEYS[:1]) == [] and pool.find(KEYS[1:2]) == pages[1:]
    assert pool.n_available == 1


def test_a_root_names_version_contract_adapter_and_identity():
    roots = {
        root_key(1, "c"),
        root_key(2, "c"),
        root_key(1, "d"),
        root_key(1, "c", adapter="a"),
        root_key(1, "c", identity="a"),
    }
    assert len(roots) == 5 and root_key(1, "c") in roots


def test_a_key_names_the_whole_prefix():
    tokens = np.arange(8)
    later = page_key(page_key(b"", tokens[:4]), tokens[4:])
    assert later != page_key(page_key(b"", tokens[:4] + 1), tokens[4:])
    assert later == page_key(page_key(b"", tokens[:4].astype(np.int64)), tokens[4:])


def test_random_use_keeps_count(rng):
    pool, held = PagePool(7, 4), []
    for _ in range(500):
        match rng.integers(4):
            case 0 if (page := pool.take()) is not None:
                held.append([page])
                pool.keep(KEYS[rng.integers(5)], page)
            case 1 if held:
                pool.release(held.pop(rng.integers(len(held))))
            case 2:
                held.append(pool.find(KEYS[rng.integers(5) :][:1]))
            case _ if held:
                pool.discard(held[-1])
        assert pool.n_held == len({page for pages in held for page in pages})
    for pages in held:
        pool.release(pages)
    assert pool.n_held == 0
