"""Copy training state to free host memory, to write it in the background."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

MEMINFO = Path("/proc/meminfo")
OWN_CGROUPS = Path("/proc/self/cgroup")
"""Lines such as `4:memory:/slurm/uid_0/job_7/step_0`, and of version 2 `0::/system.slice/slurm/job_7/step_0`."""
CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (
    ("", "memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)
"""Of cgroup's versions 2 and 1: its name, in a process's lines and as a folder; what limits, what is used, and what of that
are files that were read or written: the kernel gives their memory back before it kills.
"""


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own: Path = OWN_CGROUPS) -> int:
    """Bytes that may be taken before something is killed for want of them: of the machine, and of each group that this
    process is in. A step of Slurm limits its processes in one, and so may its job, above it.
    """
    free = read_field(meminfo, "MemAvailable:") * 1024
    for version, limit, used, cached in CGROUP_FILES:
        for group in enclosing_cgroups(cgroup / version, cgroup_path(own, version)):
            if (group / limit).is_file() and (most := (group / limit).read_text(encoding="utf-8").strip()).isdigit():
                files = sum(read_field(group / "memory.stat", name) for name in cached)
                free = min(free, max(0, int(most) - int((group / used).read_text(encoding="utf-8")) + files))
    return free


def cgroup_path(own: Path, controller: str) -> str:
    """Of this process's group, below the root; the root's where it is in none, or nothing says."""
    lines = (line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()) if own.is_file() else ()
    return next((path for _, controllers, path in lines if controller in controllers.split(",")), "/")


def enclosing_cgroups(root: Path, path: str) -> Iterator[Path]:
    """The group at `path` and those above it, up to `root`. A container sees its own as the root: it has no folder for a
    path of its host's, nor one that leads out of it, such as `/../x`.
    """
    inner = root if ".." in path.split("/") else root / path.lstrip("/")
    yield from (inner, *inner.parents[: len(inner.relative_to(root).parts)])


def read_field(file: Path, name: str) -> int:
    """The number behind a name at the beginning of a line; 0 where there is none."""
    lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return next((int(words[1]) for words in lines if words and words[0] == name), 0)


T = TypeVar("T")
Action = Callable[[], object]

MAX_PINNED_BYTES = 4 << 30
"""Bytes of a state up to which its copies lie in pinned memory, to which a GPU copies at full speed. Torch rounds each up to
a power of two there: of all weights of a large model, they would take up to twice their bytes.
"""
FREE_MEMORY_FACTOR = 2
"""Copies are made where this many times their bytes are free: others want some too, as whoever reads data does."""


class Staging:
    """Of one process, for all checkpoints of its run: the copies of each take the place of those of the one before.

    Args:
        processes: how many of this machine make such copies at the same time.
        free: how many bytes of its memory are free.
        any_process: whether something is true in one of the run's processes, all of which call it at once.
    """

    def __init__(
        self, processes: int = 1, free: Callable[[], int] = free_memory, any_process: Callable[[bool], bool] = bool
    ) -> None:
        self._processes = processes
        self._free = free
        self._any_process = any_process
        self._lacks_memory = False
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self._num_staged = 0
        self._actions: list[Action] = []
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-write")
        self._written: Future[None] | None = None

    def stage(self, state: T, write: Callable[[T], object]) -> None:
        """Have `write` called with a copy of `state`, tensors in dicts and lists, while training goes on.

        Where no memory is left for the copy, it is called with `state` itself, as `begin` is.
        """
        # What shares memory, as tied weights do, shares it in the copy too.
        distinct = {memory_key(tensor): tensor for tensor in tree_leaves(state) if isinstance(tensor, torch.Tensor)}
        room = self._allocate_buffers(list(distinct.values()))
        if room is None:
            self._lacks_memory = True
            self.add_action(lambda: write(state))
            return
        copies = dict(zip(distinct, room, strict=True))
        copy_all(distinct.values(), room)
        copy = tree_map_only(torch.Tensor, lambda tensor: copies[memory_key(tensor)], state)
        self.add_action(lambda: write(copy))

    def add_action(self, action: Action) -> None:
        """Have something done while training goes on, when all is written that was given before."""
        self._actions.append(action)

    def begin(self) -> Future[None]:
        """Write what was given. It is done when all is written, or something failed.

        Where one process lacks memory for copies, all wait for that, and what fails is raised: some of it goes from process
        to process. One that wrote by itself, and earlier, waited for the others, and they for it.
        """
        waits, self._lacks_memory = self._any_process(self._lacks_memory), False
        begun = self._written = self._writer.submit(run_actions, self._pop_actions())
        if waits:
            self.settle()
        return begun

    def settle(self) -> None:
        """Wait until all is written; then there is room for the next checkpoint. Raises what failed, once."""
        self._actions, self._num_staged, self._lacks_memory = [], 0, False
        written, self._written = self._written, None
        if written:
            written.result()

    def raise_if_failed(self) -> None:
        """Raise what has failed: the next checkpoint may be an hour away."""
        if self._written and self._written.done():
            self.settle()

    def close(self) -> None:
        """Settle after the last checkpoint. What follows training has the memory of the copies."""
        try:
            self.settle()
        finally:
            self._buffers.clear()

    def _pop_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _allocate_buffers(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """That of the state which was given in its place the last time, or new one; none where too little memory is free."""
        place, self._num_staged = self._num_staged, self._num_staged + 1
        room = self._buffers.get(place, [])
        if [shape_and_dtype(tensor) for tensor in room] == [shape_and_dtype(tensor) for tensor in tensors]:
            return room
        size = sum(tensor.nbytes for tensor in tensors)
        if size * self._processes * FREE_MEMORY_FACTOR > self._free():
            return None
        try:
            self._buffers[place] = [
                torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda and size <= MAX_PINNED_BYTES)
                for tensor in tensors
            ]
        except (RuntimeError, MemoryError):  # as torch says it, which varies: no step lacked memory, and none gets smaller
            return None
        return self._buffers[place]


@torch.no_grad()
def copy_all(tensors: Iterable[torch.Tensor], room: Iterable[torch.Tensor]) -> None:
    """By one thread, which moves some GB a second: where others want the processor too, several wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for tensor, place in zip(tensors, room, strict=True):
            place.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    finally:
        torch.set_num_threads(threads)


def memory_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """What tells it from all others that are not the same numbers in the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def shape_and_dtype(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype


def run_actions(actions: Iterable[Action]) -> None:
    for action in actions:
        action()
