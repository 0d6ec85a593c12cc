"""Kinds of failure in a RankReport that an owner tells apart; all others are only names for people."""

from __future__ import annotations

# Another rank left while this one waited for it: the cause lies there, and its own report or exit will say more.
BROKEN_COLLECTIVE = "BrokenCollective"
