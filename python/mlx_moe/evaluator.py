"""Evaluate a plan: the same model stock and replaced, at several capacities, on the same data."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from .defaults import (
    CHUNK,
    REFERENCES,
    RETRIEVAL_ITEMS,
    RETRIEVAL_LENGTH,
    TASKS,
    TEXT_TOKENS,
)
from .errors import InvalidArgument
from .evaluation import Evaluation, SideResult
from .evaluation_data import Source, read_sources
from .evaluation_sides import (
    Side,
    expert_layers,
    limited,
    stock_classes,
)
from .evaluation_tasks import QuestionTask, RetrievalTask, Task, TextTask
from .loading import replace_dense
from .plan import read_plan
from .progress import progress_bar
from .replace import check_choice, replace_moe_layers
from .retrieval import needle_questions
from .static import Importance, Overflow
from .static_paths import all_cold, static_paths, with_layers


def evaluate(
    model: Any,
    tokenizer: Any,
    data: Iterable[str | Path] | Sequence[Source],
    *,
    plan: Any = None,
    artifacts: str | Path | None = None,
    backend: str = "auto",
    capacity_factors: Sequence[float] = (),
    overflow: Overflow = "spill",
    importance: Importance = "router",
    random_control: bool = False,
    reference: Literal["stock", "cpu"] = "stock",
    tasks: Sequence[str] | None = None,
    text_tokens: int = TEXT_TOKENS,
    retrieval_length: int = RETRIEVAL_LENGTH,
    retrieval_items: int = RETRIEVAL_ITEMS,
    allow_cold: bool = False,
    checkpoint: str | Path | None = None,
    progress: bool = False,
) -> Evaluation:
    """What replaced layers change in what a model says, against the same weights in stock.

    Every batch is run by the reference and then by each side, so that all see the same tokens
    and no outputs have to be kept. The model is stock again afterwards.

    Args:
        model, tokenizer: as `mlx_lm.load` returns them, not replaced.
        data: paths of text and questions (docs/evaluate.md), or `read_sources` of them.
        plan, artifacts, overflow, importance, checkpoint: as for `replace_moe_layers`; without
            a plan the replaced layers themselves are compared, as with one for the CPU kernels.
        backend: as for `replace_moe_layers`; "auto" runs a plan's programs on "host".
        capacity_factors: beside the plan as it is, each expert's tiles limited to this share of
            its tier's capacity (above 1: further tiles of the same program).
        random_control: beside each of these, the same capacities with overflow dropped at
            random; needs overflow="prune".
        reference: "stock", mlx-lm's own code, or "cpu", the replaced layers with all experts on
            the cold path, which is much faster where MLX computes on the CPU.
        tasks: of "kl", "ppl", "choice" and "retrieval"; None for those that the data allows.
        text_tokens: of the text, for "kl" and "ppl".
        retrieval_length, retrieval_items: tokens of each text with needles; how many texts.
        allow_cold: no error where nothing ran on the static executor.

    Raises:
        BadData: a data file cannot be read.
        InvalidArgument: an argument is none of the above; nothing ran on the static executor; or
            the data has nothing for a task.
        MoEError: as `replace_moe_layers`.
    """
    check_arguments(plan, capacity_factors, overflow, random_control, reference, tasks)
    if expert_layers(model):
        raise InvalidArgument("the model is replaced already: restore_moe_layers(model) first")
    sources = _sources(data, tokenizer)
    planned = None if plan is None else read_plan(plan)
    static = planned is not None and planned.executor == "static"
    if capacity_factors and not static:
        raise InvalidArgument(
            "this plan is for the CPU kernels alone: it has no capacities to scale"
        )
    if static and backend == "auto":
        backend = "host"
    rules: Any = {"overflow": overflow, "importance": importance}
    options = {"artifacts": artifacts, "backend": backend, "checkpoint": checkpoint, **rules}
    with replaced(model, plan, **options):
        chunk = CHUNK if planned is None else planned.chunk
        todo = make_tasks(
            model, tokenizer, sources, chunk, tasks, text_tokens, retrieval_length, retrieval_items
        )
        against = Side(
            reference, partial(stock_classes if reference == "stock" else all_cold, model)
        )
        sides = make_sides(model, static, capacity_factors, random_control, **rules)
        run(model, todo, against, sides, progress)
    if static and not allow_cold:
        check_hot(sides, chunk)
    results = [
        SideResult(side, {task.name: task.metrics(side.name, reference) for task in todo})
        for side in sides
    ]
    return Evaluation(reference, chunk, rules if static else {}, results)


def check_arguments(
    plan: Any,
    capacity_factors: Sequence[float],
    overflow: str,
    random_control: bool,
    reference: str,
    tasks: Sequence[str] | None,
) -> None:
    check_choice("reference", reference, REFERENCES)
    for task in tasks or ():
        check_choice("task", task, TASKS)
    for factor in capacity_factors:
        if not (math.isfinite(factor) and factor > 0):
            raise InvalidArgument(f"capacity factor {factor} is not a positive number")
    if plan is None and (capacity_factors or random_control):
        raise InvalidArgument("capacity factors are of a plan's tiers: give a plan and artifacts")
    if random_control and overflow != "prune":
        raise InvalidArgument("dropping at random is the control of overflow='prune'")


def make_tasks(
    model: Any,
    tokenizer: Any,
    sources: Sequence[Source],
    chunk: int,
    wanted: Sequence[str] | None,
    text_tokens: int,
    retrieval_length: int,
    retrieval_items: int,
) -> list[Task]:
    """The tasks that the data allows, all of those `wanted` if any are."""
    made: list[Task] = []
    if wanted is None or {"kl", "ppl"} & set(wanted):
        text = TextTask(sources, chunk, text_tokens)
        if text.units:
            made.append(text)
        elif wanted is not None:
            raise InvalidArgument(
                f"kl and ppl need more than {chunk} tokens of text, one chunk, in a file; found "
                f"{max((len(s.text) for s in sources), default=0)}"
            )
    if wanted is None or "choice" in wanted:
        groups = [source.questions for source in sources if source.questions]
        if groups:
            made.append(QuestionTask(model, groups, chunk))
        elif wanted is not None:
            raise InvalidArgument("the task choice needs questions, and the data has none")
    if wanted is not None and "retrieval" in wanted:
        haystack = [token for source in sources for token in source.text]
        needles = needle_questions(
            haystack, tokenizer, length=retrieval_length, count=retrieval_items
        )
        made.append(RetrievalTask(model, [needles], chunk))
    if not made:
        raise InvalidArgument(
            f"the data has no questions, and no file of more than {chunk} tokens of text"
        )
    return made


def make_sides(
    model: Any,
    static: bool,
    factors: Sequence[float],
    random_control: bool,
    overflow: Overflow,
    importance: Importance,
) -> list[Side]:
    """The plan as it is, then each capacity factor and its control."""
    if not static:
        return [Side("replaced", partial(with_layers, (), ()))]
    paths = static_paths(model, ("_moe_layer",))
    sides = []
    for factor in (None, *dict.fromkeys(factors)):
        for random in (False, True) if random_control else (False,):
            layers = [
                limited(path.layer, factor, overflow, importance, seed if random else None)
                for seed, path in enumerate(paths)
                if path.layer is not None
            ]
            name = ("plan" if factor is None else f"{factor:g}") + (" random" if random else "")
            sides.append(Side(name, partial(with_layers, paths, layers), factor, random))
    return sides


def run(
    model: Any, tasks: Sequence[Task], reference: Side, sides: Sequence[Side], progress: bool
) -> None:
    """Run every unit by every side, the reference first."""
    layers = expert_layers(model)
    total = sum(len(task.units) for task in tasks) * (1 + len(sides))
    with progress_bar(progress, total=total, unit="batch") as bar:
        for task in tasks:
            for unit in task.units:
                bar.set_description(f"{task.name}, {reference.name}", refresh=False)
                expected = reference.run(model, layers, unit)
                task.add(reference.name, unit, expected, expected)
                bar.update()
                for side in sides:
                    bar.set_description(f"{task.name}, {side.name}", refresh=False)
                    task.add(side.name, unit, side.run(model, layers, unit), expected)
                    bar.update()


def check_hot(sides: Sequence[Side], chunk: int) -> None:
    """Raise InvalidArgument for a side whose every assignment was computed cold."""
    for side in sides:
        if side.counts["hot"] == 0:
            raise InvalidArgument(
                f"no assignment ran on the static executor (capacity factor: {side.name}), so "
                "this would say nothing of the plan: it has no hot experts here, its static path "
                f"starts above {chunk} tokens, or the backend is neither 'host' nor 'coreml'; "
                "--allow-cold (allow_cold=True) reports all the same"
            )


@contextmanager
def replaced(model: Any, plan: Any, **options: Any) -> Iterator[None]:
    """The model replaced, its dense layers too where MLX computes on the CPU."""
    experts = replace_moe_layers(model, plan, **options)
    dense = None
    try:
        dense = replace_dense(model, "stock" if options["backend"] == "stock" else "auto")
        yield
    finally:
        for replacement in (dense, experts):
            if replacement is not None:
                replacement.restore()


def _sources(data: Any, tokenizer: Any) -> list[Source]:
    given: list[Any] = [data] if isinstance(data, str | Path) else list(data)
    if given and all(isinstance(source, Source) for source in given):
        return given
    return read_sources(given, tokenizer)
