"""Images of control plane and engine with this checkout's code, on the test cluster's base.

The layer of locked packages is built once for each lock, and stays in a storage of buildah in the cache: changed code only
costs its own small layer, and the time to write the archives.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from resources.installation import NO_COMMIT, git_commit, git_diff
from tests.cluster.build import Cache, exclusive, report
from tests.cluster.images import base_image, containerfile, run

ROOT = Path(__file__).parents[2]
CONTROL_PLANE_IMAGE, ENGINE_IMAGE = "docker.io/hanzoai/ml", "docker.io/hanzoai/ml-engine"
TAG = "latest"
KEPT_ARCHIVES = 3
"""Of each image: the cache serves other checkouts too."""
PACKAGES, KEPT_PACKAGES = "localhost/packages", 2
BUILD_SETTINGS = ("index-url", "extra-index-url", "cert", "timeout", "proxy")


def build_product_images(cache: Cache, checkout: Path = ROOT, tag: str = TAG) -> dict[str, Path]:
    """Return the archives of control plane and engine by image name, building them where missing.

    Builds download packages: the caller is not in the network of a cluster.
    """
    with exclusive(cache.folder / "build.lock"):
        base = base_image(cache)
    with exclusive(cache.folder / "product-images.lock"):  # clusters may start in parallel
        stage, _, code = containerfile("control-plane", checkout).partition("FROM packages\n")
        commit = NO_COMMIT if git_diff(checkout) else git_commit(checkout)
        packages = digest(stage, base.name, checkout=checkout)
        control_plane = digest(containerfile("control-plane", checkout), packages, commit, tag, checkout=checkout)
        engine = digest(containerfile("engine", checkout), control_plane, checkout=checkout)
        archives = {
            f"{CONTROL_PLANE_IMAGE}:{tag}": cache.folder / f"image-ml-{control_plane}.tar",
            f"{ENGINE_IMAGE}:{tag}": cache.folder / f"image-ml-engine-{engine}.tar",
        }
        if not all(archive.exists() for archive in archives.values()):
            builder = Builder.open(cache, checkout)
            report(f"images {', '.join(archives)}")
            layer = f"{PACKAGES}:{packages}"
            if not builder.has(layer):
                report("packages of the control plane: once for each lock")
                builder.build(layer, stage, BASE_IMAGE=f"oci-archive:{base}")
            first, second = archives
            builder.build(first, f"FROM {layer}\n{code}", GIT_COMMIT=commit)
            builder.build(second, containerfile("engine", checkout), BASE_IMAGE=first)
            for name, archive in archives.items():
                builder.export(name, archive)
            builder.remove_images()
        for archive in archives.values():
            archive.touch()  # the newest are those used last
            remove_old(archive)
        return archives


@dataclass(frozen=True)
class Builder:
    """buildah with a storage in the cache."""

    cache: Cache
    checkout: Path
    command: tuple[str, ...]

    @classmethod
    def open(cls, cache: Cache, checkout: Path) -> Builder:
        """Remove what an interrupted build left."""
        folder = cache.folder / "buildah"

        def command(driver: str) -> tuple[str, ...]:
            return (
                "buildah",
                f"--storage-driver={driver}",
                f"--root={folder / driver}",
                f"--runroot={folder / 'state'}",
            )

        # Copies of whole layers are slow, but required on top of an overlay file system.
        has_overlay = subprocess.run([*command("overlay"), "info"], capture_output=True, check=False).returncode == 0
        builder = cls(cache, checkout, command("overlay" if has_overlay else "vfs"))
        builder.run("rm", "--all")
        return builder

    def run(self, *arguments: str) -> str:
        return run(*self.command, *arguments)

    def has(self, image: str) -> bool:
        return subprocess.run([*self.command, "inspect", "--type=image", image], capture_output=True).returncode == 0

    def build(self, name: str, document: str, **arguments: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "Containerfile"
            file.write_text(document)
            given = [f"--build-arg={key}={value}" for key, value in arguments.items()]
            self.run("bud", "--isolation=chroot", "--quiet", f"--tag={name}", f"--file={file}", *given,
                     *pip_options(Path(folder) / "pip.conf"), str(self.checkout))  # fmt: skip

    def export(self, name: str, archive: Path) -> None:
        """Export an archive with small layers that unpack fast: each node unpacks 1.3 GB."""

        def write(final: Path) -> None:
            self.run("push", "--quiet", "--compression-format=zstd", name, f"oci-archive:{final}:{name}")

        self.cache.publish(archive, write)

    def remove_images(self) -> None:
        """Remove all images but the newest package layers: those of two checkouts may differ."""
        images = sorted(json.loads(self.run("images", "--json")), key=lambda image: image["createdatraw"])
        packages = [image["id"] for image in images if any(name.startswith(PACKAGES) for name in image["names"] or ())]
        for image in images:
            if image["id"] not in packages[-KEPT_PACKAGES:]:
                subprocess.run([*self.command, "rmi", "--force", image["id"]], capture_output=True, check=False)


def digest(document: str, *more: str, checkout: Path) -> str:
    """Digest a Containerfile without comments, the files that it copies, and its build inputs."""
    instructions = [line for line in document.splitlines() if not line.startswith("#")]
    content = [instructions, *more, *(path_digest(checkout / name) for name in copied_paths(document))]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def copied_paths(document: str) -> list[str]:
    """Return the files and folders of the context that a Containerfile copies."""
    return [path for words in re.findall(r"^COPY (.+) \S+$", document, re.MULTILINE) for path in words.split()]


def path_digest(path: Path) -> str:
    """Digest a file, or all files in a folder but compiled ones.

    Of pyproject.toml only what affects an installation counts.
    """
    if path.name == "pyproject.toml":
        document = tomllib.loads(path.read_text())
        return json.dumps([document["project"], document["build-system"], document["tool"]["setuptools"]])
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    found = hashlib.sha256()
    for file in files:
        if file.parent.name != "__pycache__":
            found.update(f"{file.relative_to(path)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def pip_options(configuration: Path) -> list[str]:
    """Have pip in a build find packages as it does on this machine.

    Its configuration is a secret, which no image keeps.
    """
    listed = run(sys.executable, "-m", "pip", "config", "list")
    found = dict(re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    chosen = {key: value for key, value in found.items() if key in BUILD_SETTINGS}
    configuration.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in chosen.items()))
    certificates = [f"--volume={chosen['cert']}:{chosen['cert']}:ro"] if "cert" in chosen else []
    return [f"--secret=id=pip,src={configuration}", *certificates]


def remove_old(archive: Path) -> None:
    """Keep the archives of an image that were used last."""
    name = archive.name.rpartition("-")[0]
    archives = sorted(archive.parent.glob(f"{name}-{'?' * 12}.tar"), key=lambda path: path.stat().st_mtime)
    for old in archives[:-KEPT_ARCHIVES]:
        old.unlink(missing_ok=True)
