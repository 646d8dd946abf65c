"""Training libraries that the benchmark compares with."""

from importlib.util import find_spec

import pytest

from benchmarks.trainers.peers import PEERS, Peer, peer_program


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_peer_program_exists(peer: Peer) -> None:
    """After the programs had moved, every peer was reported as not running.

    The comparison continued without them.
    """
    assert find_spec(peer_program(peer))
