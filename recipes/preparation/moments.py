"""Statistics of numbers that do not depend on their order, nor on how they were shared out: sums are exact whole numbers."""

import math
from dataclasses import dataclass
from typing import Any

from recipes.contracts.job import BadConfiguration

SCALE = 1074
"""Every 64-bit float is a whole multiple of 2 to the power of minus this."""


@dataclass
class Moments:
    """Of some numbers: how many, their sum times 2^SCALE, that of their squares times 2^(2 SCALE), least and greatest."""

    count: int = 0
    total: int = 0
    squares: int = 0
    least: float = math.inf
    most: float = -math.inf

    def add(self, number: float) -> None:
        top, bottom = number.as_integer_ratio()
        whole = top << (SCALE + 1 - bottom.bit_length())
        self.merge(Moments(1, whole, whole * whole, number, number))

    def merge(self, other: "Moments") -> None:
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    def of(self, function: str) -> float | int | None:
        """An aggregate by its name; each is the float next to the exact value, and none of no numbers is null.

        Raises:
            BadConfiguration: the sum is beyond what a float can be.
        """
        if function == "count":
            return self.count
        if not self.count:
            return None
        if function == "min":
            return self.least
        if function == "max":
            return self.most
        if function == "mean":
            return self.total / (self.count << SCALE)
        if function == "std":  # of the population: that of one number is 0
            return math.isqrt(self.count * self.squares - self.total * self.total) / (self.count << SCALE)
        try:
            return self.total / (1 << SCALE)
        except OverflowError:
            raise BadConfiguration("a sum of features.aggregate is beyond 64-bit floats: scale the column before") from None

    def to_json(self) -> list[Any]:
        return [self.count, format(self.total, "x"), format(self.squares, "x"), self.least, self.most]

    @classmethod
    def from_json(cls, value: list[Any]) -> "Moments":
        count, total, squares, least, most = value
        return cls(count, int(total, 16), int(squares, 16), least, most)
