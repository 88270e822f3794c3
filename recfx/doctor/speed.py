"""How fast one thing is, and which of several numbers is best."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """The median time of one thing.

    Args:
        name: of the operator, or what else was done.
        milliseconds: the median; of the device, where it has a clock.
        bytes: that have to be read and written for it, each row as often as it is asked for.
        share_of_copy: of the bytes that a copy on the same device moved in the same time.
        share_of_chip: of the chip's memory bandwidth, by its data sheet; None if no such figure is known.
    """

    name: str
    milliseconds: float
    bytes: int
    share_of_copy: float
    share_of_chip: float | None = None

    @property
    def gb_s(self) -> float:
        """Gigabytes per second."""
        return self.bytes / self.milliseconds / 1e6


@dataclass(frozen=True)
class Choice:
    """What was tried with several numbers.

    Args:
        name: what the number is of.
        milliseconds: by number, the default first.
        chosen: the number that is in use from now on.
        kept_in: the file that says so; ``""`` if it is not kept.
    """

    name: str
    milliseconds: dict[int, float]
    chosen: int
    kept_in: str = ""
