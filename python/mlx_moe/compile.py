"""Compile a plan: Core ML packages for each of its groups, and a manifest."""

import shutil
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.nn as nn

from .compile_directory import CompileDirectory, writing
from .compile_estimate import Estimate, estimate_tasks, space_needed
from .compile_tasks import Task, WeightSource, tasks_of
from .compile_worker import WRITTEN, Worker, stage_weights
from .coreml import WEIGHTS, Weights, check_coremltools
from .errors import CorruptArtifact, DiskFull, InvalidArgument
from .manifest import Manifest
from .mil_program import INPUT, OUTPUT
from .package_entry import PackageEntry
from .package_form import MACOS, container, functions
from .plan import Plan, read_plan
from .progress import progress_bar


def compile_plan(
    model_or_path: nn.Module | str | Path,
    plan: Plan | dict[str, Any] | str | Path,
    out_dir: str | Path,
    *,
    weights: str | None = None,
    macos: int = MACOS[0],
    workers: int = 2,
    progress: bool = True,
    trust_remote_code: bool = False,
) -> Manifest:
    """Write a Core ML package for each group of `plan`, and a manifest, in `out_dir`.

    Packages that are there already, of the same model and the same group, are verified and kept;
    an interrupted compilation goes on where it stopped. The manifest is written last: a
    directory without one is not finished. Needs no Apple hardware.

    Args:
        model_or_path: a loaded model, or (better for memory: one layer at a time is read) a model
            directory or Hugging Face repository.
        plan: a `Plan`, its file (also hf://user/repo/...), or its JSON as a dict.
        out_dir: made if need be.
        weights: "fp16" (exact from MLX's quantised weights, rounded once) or "int8" (each output
            channel in 255 levels); None: as the plan says.
        macos: 15: the capacities of a group are functions of one package, and share its weights;
            14: each is a package of its own, which is as many times the space. The same weights
            and results.
        workers: processes that write packages; each needs memory of a few times the largest.
        progress: show a bar on stderr.
        trust_remote_code: allow a model that brings its own code.

    Returns:
        The manifest, as written.

    Raises:
        IdentityMismatch: the plan was made for another model.
        UnsupportedLayer: a layer's weights or activation have no program.
        InvalidArgument: an argument or a group of the plan cannot be.
        DiskFull: too little space, found before or while writing.
        CorruptArtifact: a package did not come out as it was written.
        MissingDependency: no coremltools.
    """
    options = weights, macos, trust_remote_code
    with Compilation(model_or_path, plan, out_dir, *options) as compilation:
        return compilation.run(workers, progress)


def estimate_plan(
    model_or_path: nn.Module | str | Path,
    plan: Plan | dict[str, Any] | str | Path,
    out_dir: str | Path,
    *,
    weights: str | None = None,
    macos: int = MACOS[0],
    workers: int = 2,
    trust_remote_code: bool = False,
) -> Estimate:
    """What `compile_plan` with these arguments would take, measured by a few small packages."""
    options = weights, macos, trust_remote_code
    with Compilation(model_or_path, plan, out_dir, *options) as compilation:
        return compilation.estimate(workers)


class Compilation:
    """One plan, model and directory; a context that holds the directory's lock."""

    def __init__(
        self,
        model: nn.Module | str | Path,
        plan: Plan | dict[str, Any] | str | Path,
        out_dir: str | Path,
        weights: str | None,
        macos: int,
        trust_remote_code: bool,
    ):
        self.plan = read_plan(plan)
        chosen = weights or self.plan.weights
        if chosen not in WEIGHTS:
            raise InvalidArgument(f"weights are {chosen!r}; expected {' or '.join(WEIGHTS)}")
        if macos not in MACOS:
            raise InvalidArgument(f"macos is {macos!r}; expected {' or '.join(map(str, MACOS))}")
        self.weights: Weights = chosen  # type: ignore[assignment]
        self.macos = macos
        self.tasks = tasks_of(self.plan, self.weights, macos)
        check_coremltools()
        self.source = WeightSource(model, trust_remote_code)
        self.source.check_identity(self.tasks[0].identity)
        self.activations = {task.id: self.source.activation(task) for task in self.tasks}
        self.directory = CompileDirectory(Path(out_dir))

    def __enter__(self) -> "Compilation":
        self._lock = self.directory.locked()
        self._lock.__enter__()
        self.before = self.directory.finished()
        self.current = {
            task.id: self.before[task.id]
            for task in self.tasks
            if self.directory.is_current(self.before.get(task.id), self.recipe(task))
        }
        return self

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)

    def recipe(self, task: Task) -> str:
        return task.recipe(self.activations[task.id])

    @property
    def missing(self) -> list[Task]:
        """What is still to be written, all of a layer in one go."""
        layers = list(dict.fromkeys(task.layer for task in self.tasks))
        left = [task for task in self.tasks if task.id not in self.current]
        return sorted(left, key=lambda task: layers.index(task.layer))

    def estimate(self, workers: int) -> Estimate:
        return estimate_tasks(self.tasks, self.missing, self.source, self.directory.root, workers)

    def run(self, workers: int, progress: bool) -> Manifest:
        if workers < 1:
            raise InvalidArgument(f"workers is {workers}; expected at least 1")
        if self.is_finished:
            return Manifest.load(self.directory.root)
        missing = self.missing
        self._check_space(missing, workers)
        self.directory.begin(self.before)
        bar = progress_bar(
            progress,
            total=len(self.tasks),
            initial=len(self.current),
            desc="compiling",
            unit="package",
        )
        with bar, _Workers(workers) as writers:
            for task, after in zip(missing, [*missing[1:], None], strict=True):
                writers.submit(self._staged(task))
                if after is None or after.layer != task.layer:
                    self.source.done_with(task.layer)
                while writers.busy:  # no more weights are staged than are soon written
                    self._publish(writers.next(), bar)
            while writers.pending:
                self._publish(writers.next(), bar)
        manifest = self._manifest()
        self.directory.finish(manifest, self.before)
        return manifest

    @property
    def is_finished(self) -> bool:
        """Whether the directory has all of it, with its manifest."""
        try:
            found = Manifest.load(self.directory.root)
        except CorruptArtifact:
            return False
        return not self.missing and found == self._manifest()

    def _manifest(self) -> Manifest:
        packages = [self.current[task.id] for task in self.tasks]
        identity, root = self.tasks[0].identity, self.directory.root
        return Manifest(root, self.plan.sha256, identity, self.weights, packages, self.macos)

    def _check_space(self, missing: list[Task], workers: int) -> None:
        needed, root = space_needed(missing, workers), self.directory.root
        free = shutil.disk_usage(root).free
        if free < needed:
            raise DiskFull(
                f"compiling needs {needed / 1e6:.0f} MB in {root}, and {free / 1e6:.0f} MB are "
                "free: make room, give another directory or fewer workers, or plan with less"
            )

    def _staged(self, task: Task) -> dict[str, Any]:
        """A worker's request, with its weights on the disk."""
        stage = self.directory.stage(task.id)
        with writing(self.directory.root):
            stage_weights(stage, list(self.source.experts(task)))
        return {
            "id": task.id,
            "directory": str(stage),
            "experts": list(task.experts),
            "activation": asdict(self.activations[task.id]),
            "capacities": list(task.capacities),
            "weights": task.weights,
            "macos": task.macos,
        }

    def _publish(self, reply: dict[str, Any], bar: Any) -> None:
        task = next(task for task in self.tasks if task.id == reply["id"])
        activation, places = self.activations[task.id], functions(task.capacities, task.macos)
        value = {
            "id": task.id,
            "path": container(task.id, task.macos),
            "layer": task.layer,
            "kind": task.kind,
            "experts": list(task.experts),
            "split": list(task.split),
            "hidden": task.hidden,
            "inner": task.inner,
            "activation": activation.name,
            "activation_parameters": activation.parameters,
            "functions": {str(c): asdict(place) for c, place in places.items()},
            "tier": task.capacities[-1],
            "input": INPUT,
            "output": OUTPUT,
            "recipe": self.recipe(task),
            **{key: reply[key] for key in ("files", "blob", "tensors")},
        }
        entry = PackageEntry.from_json(value, task.id)
        written = self.directory.stages / task.id / container(WRITTEN, task.macos)
        self.directory.publish(written, entry)
        self.current[task.id] = entry
        bar.update()


class _Workers:
    """Worker processes, and the requests that they have not answered."""

    def __init__(self, count: int):
        self._workers = [Worker() for _ in range(count)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._threads = ThreadPoolExecutor(count)
        self.pending: set[Future[dict[str, Any]]] = set()

    def __enter__(self) -> "_Workers":
        for worker in self._workers:
            self._idle.put(worker)
        return self

    def __exit__(self, *error: Any) -> None:
        for worker in self._workers:
            worker.close()  # ends requests that are under way
        self._threads.shutdown(cancel_futures=True)

    @property
    def busy(self) -> bool:
        """Whether each has work, and the next piece lies ready."""
        return len(self.pending) > len(self._workers)

    def submit(self, request: dict[str, Any]) -> None:
        self.pending.add(self._threads.submit(self._run, request))

    def next(self) -> dict[str, Any]:
        """The next reply; raises what went wrong in the worker."""
        done, _ = wait(self.pending, return_when=FIRST_COMPLETED)
        first = done.pop()
        self.pending.remove(first)
        return first.result()

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            return {"id": request["id"], **worker.request(request)}
        finally:
            self._idle.put(worker)
