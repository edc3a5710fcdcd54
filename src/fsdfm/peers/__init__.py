"""The systems that the paper compares with, one file each, written from their equations.

Transition probabilities, losses, teachers' targets and weight layouts; times run as everywhere here, from noise (t = 0)
to data (t = 1). What each does and where it differs from its original: docs/peers.md.

Importing the package gives their rules (`sampling.PEER_RULES`, `llada`, `dream`) and objectives (`objectives`) their
names.
"""

from fsdfm.peers import dream, llada, objectives, sampling

__all__ = ["dream", "llada", "objectives", "sampling"]
