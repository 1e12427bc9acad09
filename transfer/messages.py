"""The peer messages of `core/peer.py`, under the name of the room that gives them their meaning."""

from ..core.peer import HOLDER_MESSAGES, TAKER_MESSAGES, HolderMessage, PeerFault, PeerMessage, TakerMessage

__all__ = ["HOLDER_MESSAGES", "TAKER_MESSAGES", "HolderMessage", "PeerFault", "PeerMessage", "TakerMessage"]
