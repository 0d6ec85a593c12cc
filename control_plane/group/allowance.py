"""Bound how many groups a control plane owns at the same time (PROTOCOL C7)."""

from __future__ import annotations


class Allowance:
    """Shared by the groups of one control plane. Each takes before it claims, and gives back at its end."""

    def __init__(self, max_groups: int = 0) -> None:
        """Allow so many groups; 0: any number."""
        self._max_groups = max_groups
        self._owners: set[str] = set()

    def take(self, owner_id: str) -> str:
        """Count a group in; return nothing, or the reason why it must be left to another control plane."""
        if self._max_groups and len(self._owners | {owner_id}) > self._max_groups:
            groups = "1 group" if self._max_groups == 1 else f"{self._max_groups} groups"
            return f"left to another control plane: this one owns {groups} already"
        self._owners.add(owner_id)
        return ""

    def give_back(self, owner_id: str) -> None:
        """Count a group out. Safe for one that is not counted."""
        self._owners.discard(owner_id)
