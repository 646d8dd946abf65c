"""Container images for the nodes.

Static programs are FROM scratch, the product's own are on a Debian base.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.build import Cache, exclusive, report

ROOT = Path(__file__).parents[2]
JOB_IMAGE = "localhost/hanzo-ml:1"
"""The training image without its packages."""
PAUSE_IMAGE = "localhost/pause:1"
DEPENDENCIES = "/opt/hanzo-ml/dependencies"
"""Mount path of the volume with interpreter, packages and checkout in a pod of the job image."""

BASE_PACKAGES = (  # Python for the control plane, and libraries that modules of CPython and the wheels are linked to
    "ca-certificates",
    "libbz2-1.0",
    "libcrypt1",
    "libexpat1",
    "libffi8",
    "libgomp1",
    "liblzma5",
    "libncursesw6",
    "libnsl2",
    "libreadline8",
    "libsqlite3-0",
    "libssl3",
    "libstdc++6",
    "libtirpc3",
    "libuuid1",
    "python3",
    "python3-venv",
    "zlib1g",
)


def build_images(cache: Cache) -> list[Path]:
    """Return the images as archives in the cache, building them where missing."""
    with exclusive(cache.folder / "build.lock"):
        return [pause_image(cache), manager_image(cache, "jobset"), manager_image(cache, "kueue"), job_image(cache)]


def pause_image(cache: Cache) -> Path:
    """Build the image that holds a pod's namespaces. It sleeps."""
    containerfile = 'FROM scratch\nCOPY busybox /bin/busybox\nENTRYPOINT ["/bin/busybox", "sleep", "infinity"]\n'
    return build_image(cache, Recipe(PAUSE_IMAGE, containerfile, (Path("/usr/bin/busybox"),)))


def manager_image(cache: Cache, name: str) -> Path:
    containerfile = f'FROM scratch\nCOPY {name} /manager\nUSER 65532:65532\nENTRYPOINT ["/manager"]\n'
    return build_image(cache, Recipe(f"localhost/{name}:1", containerfile, (cache.program(name),)))


def job_image(cache: Cache) -> Path:
    arguments = {
        "BASE_IMAGE": f"oci-archive:{base_image(cache)}",
        "DEPENDENCIES": DEPENDENCIES,
        "PYTHON": f"python{sys.version_info.major}.{sys.version_info.minor}",
        "LIBPYTHON": str(sysconfig.get_config_var("INSTSONAME")),
    }
    return build_image(cache, Recipe(JOB_IMAGE, containerfile("training"), (), tuple(arguments.items()), "mounted"))


def containerfile(name: str, checkout: Path = ROOT) -> str:
    """Return the path of a product image's Containerfile."""
    return (checkout / "deploy" / "images" / name / "Containerfile").read_text()


def base_image(cache: Cache) -> Path:
    base = Recipe("localhost/base:1", "FROM scratch\nADD base.tar /\n", (debian(cache) / "base.tar",))
    return build_image(cache, base, "oci-archive")


def debian(cache: Cache) -> Path:
    """Return a base of this machine's own release, whose libraries the interpreter is linked to."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    packages = ",".join(BASE_PACKAGES)
    final = cache.folder / f"debian-{release}-{hashlib.sha256(packages.encode()).hexdigest()[:12]}"

    def make(folder: Path) -> None:
        report(f"debootstrap {release}")
        folder.mkdir()
        root = folder / "root"
        run("debootstrap", "--variant=minbase", f"--include={packages}", release, str(root))
        excluded = [f"--exclude=./{path}/*" for path in ("dev", "var/cache/apt", "var/lib/apt/lists", "usr/share/doc")]
        run("tar", "--create", f"--file={folder / 'base.tar'}", f"--directory={root}", *excluded, ".")
        shutil.rmtree(root)

    return cache.publish(final, make)


@dataclass(frozen=True)
class Recipe:
    """All inputs of an image."""

    name: str
    containerfile: str
    files: tuple[Path, ...]
    arguments: tuple[tuple[str, str], ...] = ()
    target: str = ""
    """The last stage that is built; empty for all."""

    @property
    def digest(self) -> str:
        """Digest the inputs; folders of cached files are named by a content digest."""
        content: list[object] = [self.name, self.containerfile, [str(path) for path in self.files], self.arguments]
        content += [self.target] if self.target else []
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def build_image(cache: Cache, recipe: Recipe, archive: str = "docker-archive") -> Path:
    short = recipe.name.partition("/")[2].partition(":")[0]

    def make(final: Path) -> None:
        report(f"image {short}")
        context = final.parent / "context"
        context.mkdir()
        (context / "Containerfile").write_text(recipe.containerfile)
        for path in recipe.files:
            shutil.copy(path, context)
        arguments = [f"--build-arg={name}={value}" for name, value in recipe.arguments]
        if recipe.target:
            arguments.append(f"--target={recipe.target}")
        with buildah_storage(final.parent) as buildah:
            run(*buildah, "bud", "--isolation=chroot", "--quiet", f"--tag={recipe.name}", *arguments, str(context))
            run(*buildah, "push", "--quiet", recipe.name, f"{archive}:{final}:{recipe.name}")
        shutil.rmtree(context)

    return cache.publish(cache.folder / f"image-{short}-{recipe.digest}.tar", make)


@contextmanager
def buildah_storage(folder: Path) -> Iterator[tuple[str, ...]]:
    """Run buildah with its own storage.

    Nothing stays on the machine, and it works on top of overlay file systems.
    """
    storage, state = folder / "storage", folder / "state"
    try:
        yield "buildah", "--storage-driver=vfs", f"--root={storage}", f"--runroot={state}"
    finally:
        shutil.rmtree(storage, ignore_errors=True)
        shutil.rmtree(state, ignore_errors=True)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
