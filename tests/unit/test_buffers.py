"""Memory that is used again."""

import numpy as np

from spmd_rl.packing.buffers import Buffers


def test_memory_is_used_again_only_when_no_view_is_left() -> None:
    buffers = Buffers()
    first = buffers.take(100)
    view = first[:50].view(np.int16)[3:]
    owner = id(first.base)
    del first
    assert id(buffers.take(100).base) != owner
    del view
    assert id(buffers.take(100).base) == owner


def test_what_is_small_does_not_hold_memory_that_is_large() -> None:
    buffers = Buffers()
    large = id(buffers.take(100_000).base)
    small = buffers.take(100)
    assert len(small.base) == 4096
    assert id(buffers.take(70_000).base) == large


def test_no_more_pieces_are_kept_than_it_says() -> None:
    buffers = Buffers(keep=2)
    owners = [id(piece.base) for piece in [buffers.take(100) for _ in range(3)]]
    again = [buffers.take(100) for _ in range(3)]
    assert [id(piece.base) for piece in again[:2]] == owners[1:]
