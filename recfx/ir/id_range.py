"""A range that ids are known to be in, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IdRange:
    """All ids of a feature, as they reach its collection, are in this range.

    Args:
        lower: the lowest id that may come.
        upper: the highest one.
        proof: why, in words: what the model does to its ids, and where; or that the user has declared it.
    """

    lower: int
    upper: int
    proof: str

    def __str__(self) -> str:
        return f"{self.lower} to {self.upper}"

    def __or__(self, other: IdRange) -> IdRange:
        """The range of ids that are in one or the other."""
        proof = self.proof if other.proof in self.proof else f"{self.proof}; {other.proof}"
        return IdRange(min(self.lower, other.lower), max(self.upper, other.upper), proof)
