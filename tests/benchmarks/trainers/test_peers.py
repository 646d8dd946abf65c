"""Whom we are compared with."""

from importlib.util import find_spec

import pytest

from benchmarks.trainers.peers import PEERS, Peer, peer_program


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_peer_program_exists(peer: Peer) -> None:
    """They had been moved: each of them was told not to run, and the comparison went on without."""
    assert find_spec(peer_program(peer))
