"""Detect a file's true format and encoding by its first bytes."""

from collections.abc import Mapping

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""First bytes of compressed files. No UTF-8 text begins like this."""
FORMAT_MAGIC: Mapping[bytes, str] = {b"PAR1\x15": "parquet", b"ARROW1\0\0": "arrow"}
"""No text begins like this: the bytes after the letters are not printable."""


COMPRESSION_MAGIC: Mapping[bytes, str] = {GZIP: "gzip", ZSTD: "zstd"}
"""Only line-based formats are decompressed: others are partly read from their end."""


ENCODING_MAGIC: Mapping[bytes, str] = {b"\xff\xfe\0\0": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


MAX_MAGIC_BYTES = 10


def detect_other_format(beginning: bytes, declared: str = "") -> str | None:
    """Return the problem if a file is not of format `declared`.

    None if its first bytes do not show that.
    """
    packed = next((name for start, name in COMPRESSION_MAGIC.items() if beginning.startswith(start)), None)
    if packed and declared:
        return f"is packed with {packed}: unpack it before, as a {declared} file can be compressed within"
    format = next((name for start, name in FORMAT_MAGIC.items() if beginning.startswith(start)), declared)
    return None if format == declared else f"is a {format} file: give its format as {format}"


def detect_other_encoding(beginning: bytes) -> str | None:
    """Return the problem if a file of lines is not in UTF-8.

    None if its first bytes do not show that.
    """
    name = next((name for start, name in ENCODING_MAGIC.items() if beginning.startswith(start)), None)
    if name is None:
        return None
    return f"is written in {name}, and only UTF-8 is read: write it so, as `iconv -f {name} -t UTF-8 FILE` does"
