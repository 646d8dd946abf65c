"""Compile the cluster's programs once into a cache outside the checkout.

Sources come from the Go module proxy. Each component has its own folder in the cache, named by a digest of all that decides
its content, and published by rename: an interrupted build continues with the first incomplete component, and another
version does not disturb the checkouts that still use this one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

VERSIONS = Path(__file__).with_name("versions.toml")
GO_FLAGS = "-trimpath -mod=mod"
PROGRESS_SECONDS = 20.0


class BuildError(Exception):
    """Why the cluster's programs cannot be compiled."""


@dataclass(frozen=True)
class Component:
    """Programs of one Go module, and its manifest folders that are used."""

    name: str
    module: str
    version: str
    packages: tuple[str, ...]
    go: str
    staging_version: str | None = None
    manifests: tuple[str, ...] = ()

    @property
    def programs(self) -> tuple[str, ...]:
        return tuple(Path(path).name for path in self.packages) if len(self.packages) > 1 else (self.name,)

    @property
    def imports(self) -> tuple[str, ...]:
        return tuple(f"{self.module}/{package}".rstrip("/") for package in self.packages)

    @property
    def linker_flags(self) -> str:
        """Omit symbols; Kubernetes also needs its own version, which its build scripts set."""
        flags = "-s -w"
        if self.staging_version:
            major, minor, _ = self.version.split(".")
            variables = {"gitVersion": f"v{self.version}", "gitMajor": major, "gitMinor": minor}
            flags += "".join(f" -X k8s.io/component-base/version.{name}={value}" for name, value in variables.items())
        return flags

    @property
    def digest(self) -> str:
        recipe = [{name: value for name, value in asdict(self).items() if value}, GO_FLAGS, self.linker_flags]
        return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]

    def go_mod(self, staging: list[str]) -> str:
        """Return a module that requires this one.

        `go install PACKAGE@VERSION` refuses modules that replace others, as Kubernetes does with its staging
        modules: those are replaced by their releases.
        """
        text = f"module example.com/{self.name}\n\ngo {self.go}\n\nrequire {self.module} v{self.version}\n"
        if staging:
            lines = "".join(f"\t{module} => {module} v{self.staging_version}\n" for module in staging)
            text += f"\nreplace (\n{lines})\n"
        return text

    def tools_go(self) -> str:
        """Import the programs, so that `go mod tidy` keeps what they need."""
        lines = "".join(f'\t_ "{path}"\n' for path in self.imports)
        return f"//go:build tools\n\npackage tools\n\nimport (\n{lines})\n"


def components() -> dict[str, Component]:
    document = tomllib.loads(VERSIONS.read_text())
    return {
        name: Component(
            name=name,
            module=values["module"],
            version=values["version"],
            packages=tuple(values["packages"]),
            go=document["go"],
            staging_version=values.get("staging_version"),
            manifests=tuple(values.get("manifests", ())),
        )
        for name, values in document["components"].items()
    }


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hanzo-ml" / "cluster"


@dataclass(frozen=True)
class Cache:
    """Compiled components and images, and their sources."""

    folder: Path = field(default_factory=default_cache)

    def component(self, name: str) -> Path:
        component = components()[name]
        return self.folder / f"{name}-{component.version}-{component.digest}"

    def program(self, name: str) -> Path:
        component = next(component for component in components().values() if name in component.programs)
        return self.component(component.name) / "bin" / name

    def manifests(self, name: str) -> Path:
        return self.component(name) / "manifests.yaml"

    def publish(self, final: Path, make: Callable[[Path], None]) -> Path:
        """Have `make` fill a temporary sibling, and rename it when it is complete."""
        if not final.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            for abandoned in self.folder.glob(f".{final.name}.*"):
                shutil.rmtree(abandoned)
            temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=self.folder))
            made = temporary / final.name
            make(made)
            made.rename(final)
            shutil.rmtree(temporary)
        return final


def report(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Admit one process at a time, until it leaves or dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def missing_components(cache: Cache) -> list[Component]:
    return [component for component in components().values() if not cache.component(component.name).exists()]


def compile_components(cache: Cache) -> None:
    """Compile what the cache lacks; the first time takes half an hour or more."""
    with exclusive(cache.folder / "build.lock"):
        missing = missing_components(cache)
        if not missing:
            return
        report(f"compiling {', '.join(component.name for component in missing)}: once, into {cache.folder}")
        toolchain = Toolchain.private(cache.folder / "go")
        for component in missing:
            began = time.monotonic()
            cache.publish(cache.component(component.name), partial(build, component, toolchain=toolchain, cache=cache))
            report(f"{component.name} {component.version}: {time.monotonic() - began:.0f} s")
        toolchain.remove()


@dataclass(frozen=True)
class Toolchain:
    """The Go toolchain with its own caches.

    They are as large as the sources: 12 GB that are useless after the build. Caches that the environment names are used
    instead, and kept.
    """

    environment: Mapping[str, str]
    caches: Path

    @classmethod
    def private(cls, caches: Path) -> Toolchain:
        own = {"GOCACHE": str(caches / "build"), "GOMODCACHE": str(caches / "modules")}
        flags = {"CGO_ENABLED": "0", "GOFLAGS": f"{GO_FLAGS} -modcacherw", "GOWORK": "off"}
        return cls({**own, **os.environ, **flags}, caches)

    def remove(self) -> None:
        shutil.rmtree(self.caches, ignore_errors=True)

    def run(self, *arguments: str, folder: Path) -> str:
        command = ["go", *arguments]
        done = subprocess.run(command, cwd=folder, env=dict(self.environment), capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        return done.stdout

    def compile(self, *arguments: str, folder: Path, title: str) -> None:
        """Run `go build`, with a line of progress from time to time."""
        command = ["go", "build", "-v", *arguments]
        process = subprocess.Popen(command, cwd=folder, env=dict(self.environment), stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        output: list[str] = []
        last = time.monotonic()
        for line in process.stderr:
            output.append(line)
            if time.monotonic() - last > PROGRESS_SECONDS:
                last = time.monotonic()
                compiled = sum(not line.startswith("go: ") for line in output)  # others are downloads
                report(f"{title}: {compiled} packages compiled")
        if process.wait():
            raise BuildError(f"{' '.join(command)} failed:\n{''.join(output[-40:])}")

    def source(self, component: Component, folder: Path) -> Path:
        """Return the folder of a module's sources."""
        release = f"{component.module}@v{component.version}"
        return Path(json.loads(self.run("mod", "download", "-json", release, folder=folder))["Dir"])


def build(component: Component, folder: Path, toolchain: Toolchain, cache: Cache) -> None:
    programs, module = folder / "bin", folder.parent / "module"
    programs.mkdir(parents=True)
    module.mkdir()
    source = toolchain.source(component, module)
    staging = staging_modules((source / "go.mod").read_text()) if component.staging_version else []
    (module / "go.mod").write_text(component.go_mod(staging))
    if staging:
        (module / "tools.go").write_text(component.tools_go())
        toolchain.run("mod", "tidy", folder=module)
    output = f"{programs}/" if len(component.programs) > 1 else str(programs / component.name)
    toolchain.compile(
        "-ldflags", component.linker_flags, "-o", output, *component.imports, folder=module, title=component.name
    )
    if component.manifests:
        kubectl = str(cache.program("kubectl"))
        documents = [
            subprocess.run([kubectl, "kustomize", source / path], capture_output=True, text=True, check=True).stdout
            for path in component.manifests
        ]
        (folder / "manifests.yaml").write_text(with_local_image("---\n".join(documents), component.name))
    shutil.rmtree(module)


def staging_modules(go_mod: str) -> list[str]:
    """List the modules that Kubernetes replaces by folders of its own repository."""
    return re.findall(r"^\s+(\S+) => \./staging/\S+$", go_mod, re.MULTILINE)


def with_local_image(manifests: str, name: str) -> str:
    """Return a project's manifests with our image and small processor requests."""
    for pattern, replacement in (
        (r"image: (?:\S+/)?" + name + r":\S+", f"image: localhost/{name}:1"),
        (r"imagePullPolicy: Always", "imagePullPolicy: IfNotPresent"),
        (r"cpu: 500m", "cpu: 50m"),
    ):
        manifests = re.sub(pattern, replacement, manifests)
    return manifests
