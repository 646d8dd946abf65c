"""What a file is by how it begins, for whoever said that it is something else."""

from collections.abc import Mapping

FORMATS: Mapping[bytes, str] = {b"PAR1\x15": "parquet", b"ARROW1\0\0": "arrow"}
"""No text begins so: what comes behind the word has no letter."""
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""How compressed files begin. No text in UTF-8 does."""
PACKED: Mapping[bytes, str] = {GZIP: "gzip", ZSTD: "zstd"}
"""Only files of lines are unpacked: of the others some is read from their end."""
ENCODINGS: Mapping[bytes, str] = {b"\xff\xfe\0\0": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
LONGEST_BEGINNING = 10


def another_format(beginning: bytes, said: str = "") -> str | None:
    """That a file is of another format than `said`, as what follows its name; None where its beginning does not tell."""
    packed = next((name for start, name in PACKED.items() if beginning.startswith(start)), None)
    if packed and said:
        return f"is packed with {packed}: unpack it before, as a {said} file can be compressed within"
    format = next((name for start, name in FORMATS.items() if beginning.startswith(start)), said)
    return None if format == said else f"is a {format} file: give its format as {format}"


def another_encoding(beginning: bytes) -> str | None:
    """That a file of lines is not in UTF-8, as what follows its name; None where its beginning does not tell."""
    name = next((name for start, name in ENCODINGS.items() if beginning.startswith(start)), None)
    if name is None:
        return None
    return f"is written in {name}, and only UTF-8 is read: write it so, as `iconv -f {name} -t UTF-8 FILE` does"
