"""Measure this machine: the device profile that `plan` reads."""

import datetime
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from . import core, tune_cold, tune_fit
from .cost import Expert
from .defaults import STATICS
from .devices import NUMBERS, SIMULATION, Device, Number, builtin, this_device
from .durable import write_json
from .errors import InvalidArgument, MissingDependency, MoEError
from .layer_facts import LayerFacts, WeightFacts
from .machine import chip, coreml_missing, memory_bytes
from .measured import Measurements, Sample
from .plan_cpu import PACKED_BYTES
from .progress import progress_bar
from .tune_cold import ColdPath, Shape
from .tune_static import HostPrograms, Programs, StaticPath, read_bandwidth

EXPERTS, TOP_K = 16, 8  # with a load in each call
DEFAULT = Shape(2048, 768, EXPERTS, TOP_K, WeightFacts("affine", 4, 64, "bfloat16"))
DEFAULT_CACHE = 32 << 20  # bytes, where the system does not say
PACKAGE_BYTES = 200e6  # as the built-in profiles have it
MEMORY_SHARE = 8  # at most one in so many bytes of memory for measuring


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rows: tuple[int, ...]
    groups: tuple[int, ...]
    capacities: tuple[int, ...]
    repeats: int


FULL = Effort((1, 4, 16, 32, 64, 128, 256), (1, 4, 8), (32, 64, 128, 256), 7)
QUICK = Effort((1, 32, 128), (1, 8), (32, 128), 3)


def shape_of(facts: LayerFacts) -> Shape:
    """What is measured for a layer: experts of its size and format."""
    experts = min(facts.experts, EXPERTS)
    top_k = min(facts.top_k, TOP_K, experts)
    return Shape(facts.hidden, facts.inner, experts, top_k, facts.weights)


def tune(
    shape: Shape = DEFAULT,
    *,
    static: str = "auto",
    quick: bool = False,
    effort: Effort | None = None,
    progress: bool = False,
) -> Device:
    """Measure the cold path, and a static executor where there is one.

    Args:
        shape: of the experts that are measured.
        static: "coreml" measures Core ML's programs, "host" the executor that computes them on
            the CPU, for trying plans; "none" leaves the static executor's numbers as built in;
            "auto" is "coreml" where there is a Neural Engine, else "none".
        quick: fewer sizes and repetitions.
        effort: what is measured, exactly.
        progress: show a bar on stderr.

    Returns:
        A profile: of executor "static" on Apple silicon and for "host", else "cpu".

    Raises:
        InvalidArgument: another `static`, or experts of a format that cannot be made up.
        MissingDependency: "coreml" without Core ML.
    """
    if static not in STATICS:
        raise InvalidArgument(f"static is {static!r}; expected one of {', '.join(STATICS)}")
    effort = effort or (QUICK if quick else FULL)
    base = builtin(this_device())
    if static == "auto":
        static = "coreml" if base.executor == "static" and coreml_missing() is None else "none"
    if static == "coreml" and (missing := coreml_missing()) is not None:
        raise MissingDependency(f"--static coreml: {missing}")
    measures = static in MAKERS
    date = datetime.date.today().isoformat()
    steps = len(effort.rows) + 3 + (len(effort.groups) + 2 if measures else 0)
    with progress_bar(progress, total=steps, unit="step") as bar:

        def step(what: str) -> None:
            bar.set_description(what)
            bar.update()

        numbers, samples, overlap = _measure(shape, static, effort, base, step)
    source = _source(shape, date)
    executor = "static" if measures else base.executor
    found = {
        name: Number(value, NUMBERS[executor][name], f"{source}{note}", True)
        for name, (value, note) in numbers.items()
    }
    for name in NUMBERS[executor]:  # what cannot be measured stays as it was, and says so
        if name not in found:
            found[name] = base.numbers.get(name) or _assumed(name)
    return Device(
        f"{base.name}-tuned",
        executor,
        f"{chip()}, measured {date}" + (", host executor" if static == "host" else ""),
        {name: found[name] for name in NUMBERS[executor]},
        Measurements(date, overlap, tuple(samples)),
        simulation=_simulation(base, source),
    )


def _simulation(base: Device, source: str) -> dict[str, Number]:
    """What only `simulate` reads stays as it was; on a CPU the cores are those measured with."""
    if base.executor != "cpu":
        return base.simulation
    cores = Number(core.num_threads(), SIMULATION["host_cores"], source, True)
    return {**base.simulation, "host_cores": cores}


def _measure(
    shape: Shape, static: str, effort: Effort, base: Device, step: Callable[[str], None]
) -> tuple[dict[str, tuple[float, str]], list[Sample], float | None]:
    """Numbers with a note on each, the samples behind them, and the overlap of the two paths."""
    numbers: dict[str, tuple[float, str]] = {}
    memory = memory_bytes()
    if memory is not None:
        numbers["memory_bytes"] = (memory, "")
    cache = min(cache_bytes(), (memory or DEFAULT_CACHE) // MEMORY_SHARE // 2)
    step("memory")
    bandwidth = read_bandwidth(min(2 * cache, tune_cold.MOST_BYTES), core.num_threads(), 3)
    cold = ColdPath(shape, cache)
    step("experts")
    samples = [cold.sample(min(effort.rows), effort.repeats, experts=1)]
    for rows in effort.rows:
        samples.append(cold.sample(rows, effort.repeats))
        step(f"{rows} rows")
    fitted = tune_fit.cold_numbers(samples, shape.flops, cold.expert_bytes)
    note = f"; plain reading reaches {bandwidth / 1e9:.1f} GB/s"
    numbers |= {name: (value, "") for name, value in fitted.items()}
    numbers["cold_bandwidth"] = (fitted["cold_bandwidth"], note)
    if base.executor == "cpu" and static not in MAKERS:
        numbers["packed_speedup"] = _packed(shape, effort.repeats, bandwidth)
    step("copies")
    overlap = None
    if static in MAKERS:
        own, found, overlap = _measure_static(shape, MAKERS[static], effort, cold, step)
        numbers |= own
        if static == "host":
            numbers["on_chip_bytes"] = (cache_bytes(), "")
        samples += found
    return numbers, samples, overlap


def _packed(shape: Shape, repeats: int, bandwidth: float) -> tuple[float, str]:
    found = tune_cold.packed_speedup(shape, repeats)
    if found is None:
        fixed = tune_cold.fixed_seconds(shape, repeats)
        read = 3 * shape.hidden * shape.inner * PACKED_BYTES / bandwidth
        return 1.0, (
            f"; the kernel in use ({core.isa()}) reads weights in place: an expert takes "
            f"{1e6 * fixed:.0f} us beside its rows, and a bf16 copy {1e6 * read:.0f} us to read"
        )
    return found, f"; copies against in place at {tune_cold.PACKED_ROWS} rows an expert"


def _measure_static(
    shape: Shape,
    make: Callable[[Path], Programs],
    effort: Effort,
    cold: ColdPath,
    step: Callable[[str], None],
) -> tuple[dict[str, tuple[float, str]], list[Sample], float]:
    expert = Expert(shape.hidden, shape.inner, 3, False, cold.expert_bytes)
    with closing(StaticPath(make)) as path:
        dispatch, wait = path.dispatch(10 * effort.repeats)
        step("dispatch")
        samples: list[Sample] = []
        for experts in effort.groups:
            samples += path.samples(shape, experts, effort.capacities, effort.repeats)
            step(f"groups of {experts}")
        middle = effort.rows[len(effort.rows) // 2]
        x, ids = tune_cold.routing(shape, middle, shape.experts)
        mx.eval(x, ids)
        largest = effort.groups[-1], effort.capacities[-1]
        overlap = path.overlap(shape, *largest, lambda: cold.call(x, ids), effort.repeats)
        step("both at once")
    fitted = tune_fit.static_numbers(
        samples, expert.flops, float(expert.static_bytes("fp16")), dispatch
    )
    numbers = {name: (value, "") for name, value in fitted.items()}
    numbers["dispatch_seconds"], numbers["sync_seconds"] = (dispatch, ""), (wait, "")
    return numbers, samples, overlap


def _coreml_programs(directory: Path) -> Programs:
    from .tune_coreml import MadeUpPrograms

    return MadeUpPrograms(directory)


MAKERS: dict[str, Callable[[Path], Programs]] = {"host": HostPrograms, "coreml": _coreml_programs}


def _assumed(name: str) -> Number:
    value = {"package_bytes": PACKAGE_BYTES}[name]
    return Number(value, NUMBERS["static"][name], "assumption of the built-in profiles", False)


def _source(shape: Shape, date: str) -> str:
    how = f"{chip()}, {core.isa()}, {core.num_threads()} threads"
    return f"mlx_moe tune, {date}: {how}, experts of {shape}"


def cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Of the processor's last-level cache."""
    sizes = []
    for file in root.glob("index*/size"):
        if match := re.fullmatch(r"(\d+)([KMG]?)\s*", file.read_text()):
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes, default=DEFAULT_CACHE)


def save(device: Device, path: Path) -> None:
    """Write the profile; whole or not at all."""
    try:
        write_json(path, device.as_dict())
    except OSError as error:
        raise MoEError(f"cannot write the profile {path}: {error.strerror}") from error
