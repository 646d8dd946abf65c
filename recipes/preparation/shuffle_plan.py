"""Plan an external shuffle as a tree of buckets, with seeded order keys."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Numbers that look random and are the same everywhere: the order of a shuffle.


def mix_bits(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Other numbers for other seeds, each a permutation of all 64-bit numbers (the finalizer of splitmix64)."""
    salt = np.uint64((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF)
    mixed_values = (values ^ salt) + np.uint64(0x9E3779B97F4A7C15)
    mixed_values = (mixed_values ^ (mixed_values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_values = (mixed_values ^ (mixed_values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed_values ^= mixed_values >> np.uint64(31)
    return mixed_values


# Through which files the records come from the ranges to the parts: buckets of parts, split until few files hold a
# bucket.
#
# If each part read what every range has for it, ten times the input would be a hundred times the files to open. Here up
# to `fan` files of a bucket, a group, are read once, and written as one file for each smaller bucket: about as many files
# as before, of which a bucket has a `fan`th. What is opened grows as the input does, times the logarithm to the base
# `fan`: of 10 TB in ranges of 16 MiB that is two rounds, and below 4 GB none.

MERGE_FAN_IN = 256
"""Files that are read together at most: few enough to be open at a time, each with a piece worth going to the disk for."""


@dataclass(frozen=True)
class Bucket:
    """Parts `first` to before `end`, whose records lie in `files` files; at level 0 these are the ranges, sorted."""

    level: int
    first: int
    end: int
    files: int


def split_evenly(first: int, end: int, count: int) -> list[int]:
    """The borders of `count` runs of about one length."""
    return [first + (end - first) * place // count for place in range(count + 1)]


@dataclass(frozen=True)
class ShufflePlan:
    """How many ranges there are, pods, and, once it is known, parts: the same for all units of work."""

    ranges: int
    pods: int
    fan: int
    parts: int = 0

    @property
    def root(self) -> Bucket:
        return Bucket(0, 0, self.parts, self.ranges)

    def groups(self, bucket: Bucket) -> list[range]:
        """The files that are read together, by their numbers; the ranges of a pod lie on no other."""
        pods = self.pods if bucket.level == 0 else 1
        of_pods = (range(rank, bucket.files, pods) for rank in range(pods))
        return [files[begin : begin + self.fan] for files in of_pods for begin in range(0, len(files), self.fan)]

    def own_groups(self, rank: int) -> dict[int, range]:
        """The groups of ranges that a pod has, by their numbers."""
        return {number: group for number, group in enumerate(self.groups(self.root)) if group.start % self.pods == rank}

    def count_groups(self, bucket: Bucket) -> int:
        pods = self.pods if bucket.level == 0 else 1
        return sum(-(-len(range(rank, bucket.files, pods)) // self.fan) for rank in range(pods))

    def is_ready(self, bucket: Bucket) -> bool:
        """Whether a part reads all of its bucket's files: they are few, and in one place."""
        return self.count_groups(bucket) == 1 and (bucket.level > 0 or self.pods == 1)

    def boundaries(self, bucket: Bucket) -> list[int]:
        """First parts of its smaller buckets, and its end: so many that what a group has for one is about a part's.

        Of a bucket that is ready these are its parts; at level 0 none of them is of two pods.
        """
        groups = self.count_groups(bucket)
        runs = split_evenly(bucket.first, bucket.end, self.pods if bucket.level == 0 else 1)
        found = [bucket.first]
        for first, end in pairwise(runs):
            found += split_evenly(first, end, -(-(end - first) // groups))[1:] if end > first else []
        return found

    def child_buckets(self, bucket: Bucket) -> list[Bucket]:
        """The buckets that it is split into: each lies in one file of every group."""
        borders, groups = self.boundaries(bucket), self.count_groups(bucket)
        return [Bucket(bucket.level + 1, first, end, groups) for first, end in pairwise(borders)]
