"""Plan an external shuffle as a tree of buckets, with seeded order keys."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Pseudorandom numbers that are equal on all machines: the order of a shuffle.


def mix_bits(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Permute all 64-bit numbers, differently for each seed (the finalizer of splitmix64)."""
    salt = np.uint64((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF)
    mixed_values = (values ^ salt) + np.uint64(0x9E3779B97F4A7C15)
    mixed_values = (mixed_values ^ (mixed_values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_values = (mixed_values ^ (mixed_values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed_values ^= mixed_values >> np.uint64(31)
    return mixed_values


# An external shuffle routes records from ranges to parts through buckets of parts, which are split until each bucket is in
# few files.
#
# If each part read its records from every range, ten times the input would need a hundred times as many file opens. Instead,
# groups of up to `fan` files of a bucket are read once and written as one file per smaller bucket: the number of files stays
# about the same, of which a bucket has a `fan`th. The number of opens grows linearly with the input, times a logarithm to
# the base `fan`: two rounds for 10 TB in ranges of 16 MiB, none below 4 GB.

MERGE_FAN_IN = 256
"""Maximum files read together: few enough to open at once, each with a buffer large enough for efficient disk reads."""


@dataclass(frozen=True)
class Bucket:
    """Parts `first` to `end` (exclusive), whose records are in `files` files.

    At level 0 the sorted ranges.
    """

    level: int
    first: int
    end: int
    files: int


def split_evenly(first: int, end: int, count: int) -> list[int]:
    """Return the borders of `count` runs of nearly equal length."""
    return [first + (end - first) * place // count for place in range(count + 1)]


@dataclass(frozen=True)
class ShufflePlan:
    """Numbers of ranges, pods and, once known, parts; equal for all units of work."""

    ranges: int
    pods: int
    fan: int
    parts: int = 0

    @property
    def root(self) -> Bucket:
        return Bucket(0, 0, self.parts, self.ranges)

    def groups(self, bucket: Bucket) -> list[range]:
        """Return the file numbers that are read together.

        A pod's ranges are only on that pod.
        """
        pods = self.pods if bucket.level == 0 else 1
        of_pods = (range(rank, bucket.files, pods) for rank in range(pods))
        return [files[begin : begin + self.fan] for files in of_pods for begin in range(0, len(files), self.fan)]

    def own_groups(self, rank: int) -> dict[int, range]:
        """Return the groups of a pod's ranges by number."""
        return {number: group for number, group in enumerate(self.groups(self.root)) if group.start % self.pods == rank}

    def count_groups(self, bucket: Bucket) -> int:
        pods = self.pods if bucket.level == 0 else 1
        return sum(-(-len(range(rank, bucket.files, pods)) // self.fan) for rank in range(pods))

    def is_ready(self, bucket: Bucket) -> bool:
        """Return whether parts can be read directly from the bucket's files.

        They are few and on one pod.
        """
        return self.count_groups(bucket) == 1 and (bucket.level > 0 or self.pods == 1)

    def boundaries(self, bucket: Bucket) -> list[int]:
        """Return the first parts of a bucket's children, and its end.

        Children are sized so that a group's share of one is about the size of a part. For a ready bucket the children are
        its parts; at level 0 each child belongs to one pod.
        """
        groups = self.count_groups(bucket)
        runs = split_evenly(bucket.first, bucket.end, self.pods if bucket.level == 0 else 1)
        found = [bucket.first]
        for first, end in pairwise(runs):
            found += split_evenly(first, end, -(-(end - first) // groups))[1:] if end > first else []
        return found

    def child_buckets(self, bucket: Bucket) -> list[Bucket]:
        """Return the buckets that it is split into; each has one file per group."""
        borders, groups = self.boundaries(bucket), self.count_groups(bucket)
        return [Bucket(bucket.level + 1, first, end, groups) for first, end in pairwise(borders)]
