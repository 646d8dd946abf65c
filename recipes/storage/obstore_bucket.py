"""Buckets in a folder or on an S3 server, accessed through obstore."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore

from recipes.storage.bucket_operations import ObjectHead
from recipes.storage.buckets import (
    NO_SUCH_BUCKET,
    Bucket,
    list_folder,
    require_mounted_bucket,
    translate_listing_errors,
    translate_store_errors,
    walk_files,
)
from recipes.storage.object_transfer import (
    CONCURRENT_PARTS,
    MIN_PART_BYTES,
    RANGE_BYTES,
    READ_CHUNK_BYTES,
    chain_chunks,
    choose_part_bytes,
)


class ObstoreBucket:
    """Implements `recipes.storage.bucket_operations.BucketOperations` for an open bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._folder = Path(str(bucket.prefix)) if isinstance(bucket, LocalStore) else None
        self._exists = self._folder is not None

    @property
    def reads_in_parallel(self) -> bool:
        return self._folder is None

    def put(self, uri: str, key: str, data: bytes) -> None:
        with translate_store_errors(uri, self.bucket, writing=True):
            obstore.put(self.bucket, key, data)

    def put_file(self, uri: str, key: str, path: Path, parts_at_once: int) -> None:
        """Upload in parts of 8 MB each.

        For files beyond 72 GB, of a 9,000th of the file.
        """
        # The size is read first: a missing file must not be reported as a missing bucket.
        part_bytes = max(RANGE_BYTES, choose_part_bytes(path.stat().st_size))
        with translate_store_errors(uri, self.bucket, writing=True):
            obstore.put(self.bucket, key, path, chunk_size=part_bytes, max_concurrency=parts_at_once)

    async def put_stream(self, uri: str, key: str, chunks: AsyncIterator[bytes], size: int | None) -> None:
        first: list[bytes] = []
        length = 0
        async for chunk in chunks:
            first.append(chunk)
            length += len(chunk)
            if length >= MIN_PART_BYTES:
                break
        with translate_store_errors(uri, self.bucket, writing=True):
            if length < MIN_PART_BYTES:  # one request instead of three
                await obstore.put_async(self.bucket, key, b"".join(first))
                return
            part_bytes, whole = choose_part_bytes(size), chain_chunks(first, chunks)
            await obstore.put_async(self.bucket, key, whole, chunk_size=part_bytes, max_concurrency=CONCURRENT_PARTS)

    def copy(self, uri: str, key: str, new_uri: str, new_key: str) -> None:
        with translate_store_errors(uri, self.bucket):
            obstore.copy(self.bucket, key, new_key)

    def head(self, uri: str, key: str) -> ObjectHead:
        with translate_store_errors(uri, self.bucket):
            try:
                meta = obstore.head(self.bucket, key)
            except FileNotFoundError:
                self._require_bucket(key)
                raise
        return ObjectHead(meta["size"], meta["e_tag"] or "", int(meta["last_modified"].timestamp() * 1000))

    def read(self, uri: str, key: str, start: int, stop: int, version: str) -> Iterator[bytes]:
        with translate_store_errors(uri, self.bucket):
            if version:
                found = obstore.get(self.bucket, key, options={"range": (start, stop), "if_match": version})
            else:
                found = obstore.get(self.bucket, key, options={"range": (start, stop)})
        return self._stream(uri, found)

    def prepare_reads(self, uris: Sequence[str]) -> None:
        """No preparation is needed."""

    def entries(self, uri: str, key: str) -> list[tuple[str, int]]:
        if self._folder is not None:
            with translate_listing_errors(uri, self.bucket):
                found = walk_files(self._folder / key)
                return [(path.relative_to(self._folder).as_posix(), size) for path, size in found]
        with translate_store_errors(uri, self.bucket):
            metas = [meta for batch in obstore.list(self.bucket, prefix=key) for meta in batch]
        return [(meta["path"], meta["size"]) for meta in metas if meta["path"] != key]

    def list_folder(self, uri: str, key: str) -> tuple[list[tuple[str, int]], list[str]]:
        if self._folder is not None:
            with translate_listing_errors(uri, self.bucket):
                return list_folder(self._folder / key)
        with translate_store_errors(uri, self.bucket):
            found = obstore.list_with_delimiter(self.bucket, prefix=key)
        files = [(meta["path"].rpartition("/")[2], meta["size"]) for meta in found["objects"] if meta["path"] != key]
        return files, [prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]]

    def remove(self, uri: str, key: str) -> None:
        with suppress(FileNotFoundError), translate_store_errors(uri, self.bucket):
            obstore.delete(self.bucket, key)

    def signed_url(self, uri: str, key: str, seconds: int) -> str | None:
        if isinstance(self.bucket, LocalStore):
            return None
        with translate_store_errors(uri, self.bucket):
            return str(obstore.sign(self.bucket, "GET", key, expires_in=timedelta(seconds=seconds)))

    def require_mounted(self, uri: str) -> None:
        require_mounted_bucket(uri, self.bucket)

    def _require_bucket(self, key: str) -> None:
        """Check once that the bucket exists.

        S3 answers HEAD alike for a missing bucket and a missing object. Raises the library's error, which names the bucket.
        """
        if self._exists:
            return
        try:
            next(iter(obstore.list(self.bucket, prefix=key)), None)
        except BaseError as error:  # inconclusive for keys without permission to list
            if NO_SUCH_BUCKET in str(error):
                raise
        self._exists = True

    def _stream(self, uri: str, found: "obstore.GetResult") -> Iterator[bytes]:
        with translate_store_errors(uri, self.bucket):
            for chunk in found.stream(min_chunk_size=READ_CHUNK_BYTES):
                yield bytes(chunk)
