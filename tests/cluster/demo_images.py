"""Images of the demo's PostgreSQL and S3 server, under names of the tests.

They have Debian's binaries and the compiled versitygw.
"""

import subprocess
import tarfile
from pathlib import Path

from tests.cluster.build import Cache, exclusive
from tests.cluster.images import Recipe, base_image, build_image
from tests.support import postgres_server

POSTGRES_IMAGE, S3_IMAGE = "localhost/postgres:1", "localhost/versitygw:1"
PROGRAMS = ("postgres", "initdb", "pg_isready")
BASE_LIBRARIES = ("linux-vdso", "ld-linux", "libc.so", "libm.so")

ENTRYPOINT = """\
#!/bin/sh
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  printf %s "$POSTGRES_PASSWORD" > /tmp/password
  initdb --username="$POSTGRES_USER" --pwfile=/tmp/password --auth=scram-sha-256 --encoding=UTF8 --locale=C --no-sync
  rm /tmp/password
  echo "CREATE DATABASE $POSTGRES_DB;" | postgres --single -D "$PGDATA" postgres > /dev/null
  echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
fi
exec postgres -D "$PGDATA" -c listen_addresses='*' -c unix_socket_directories=/var/run/postgresql -c fsync=off "$@"
"""
"""What the official image's entry point does, as far as the demo needs it."""

CONTAINERFILE = """\
ARG BASE_IMAGE
FROM ${{BASE_IMAGE}}
ADD postgres.tar /
RUN groupadd --gid 999 postgres && useradd --uid 999 --gid 999 postgres
ENV PATH={binaries}:/usr/local/bin:/usr/bin:/bin
USER 999:999
ENTRYPOINT ["/entrypoint"]
"""


def demo_images(cache: Cache) -> list[Path]:
    """Return the images as archives in the cache, building them where missing."""
    with exclusive(cache.folder / "build.lock"):
        return [postgres_image(cache), s3_image(cache)]


def s3_image(cache: Cache) -> Path:
    containerfile = 'FROM scratch\nCOPY versitygw /versitygw\nENTRYPOINT ["/versitygw"]\n'
    return build_image(cache, Recipe(S3_IMAGE, containerfile, (cache.program("versitygw"),)))


def postgres_image(cache: Cache) -> Path:
    binaries = postgres_server.binaries()
    version = subprocess.run([binaries / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    archive = cache.publish(cache.folder / f"postgres-{version.split()[2]}", lambda folder: pack_postgres(binaries, folder))
    arguments = (("BASE_IMAGE", f"oci-archive:{base_image(cache)}"),)
    containerfile = CONTAINERFILE.format(binaries=binaries)
    return build_image(cache, Recipe(POSTGRES_IMAGE, containerfile, (archive / "postgres.tar",), arguments))


def pack_postgres(binaries: Path, folder: Path) -> None:
    """Pack a server with the libraries that the base lacks, at their own paths."""
    folder.mkdir()
    share = subprocess.run([binaries / "pg_config", "--sharedir"], capture_output=True, text=True, check=True).stdout.strip()
    modules = [path for path in (binaries.parent / "lib").glob("*.so") if not path.name.startswith("llvmjit")]
    programs = [binaries / name for name in PROGRAMS]
    libraries = {library for program in (*programs, *modules) for library in linked_libraries(program)}
    entrypoint = folder / "entrypoint"
    entrypoint.write_text(ENTRYPOINT)
    entrypoint.chmod(0o755)
    with tarfile.open(folder / "postgres.tar", "w", dereference=True) as archive:
        archive.add(entrypoint, "entrypoint")
        for path in (*programs, *modules, *sorted(libraries), Path(share)):
            archive.add(path, str(path.parent.resolve() / path.name).lstrip("/"))


def linked_libraries(program: Path) -> set[Path]:
    done = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    words = [line.split() for line in done.stdout.splitlines() if "=> /" in line]
    return {Path(each[2]) for each in words if not each[0].startswith(BASE_LIBRARIES)}
