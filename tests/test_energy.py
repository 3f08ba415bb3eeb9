"""Energy by counters of a made-up powercap tree and by powermetrics' text; what a token took."""

import sys
import threading
from pathlib import Path
from time import sleep

import mlx.core as mx
import mlx_lm
import pytest

from mlx_moe import energy
from mlx_moe.cli import energy_report
from mlx_moe.cli.measure import Measurement, Trial, Workload, measure
from mlx_moe.cycles import process_cycles
from mlx_moe.energy import Meter, PowerMetrics, Rapl, Use, parse_powermetrics
from mlx_moe.loading import Replaced

RANGE = 1000  # microjoules


def zone(root: Path, path: str, name: str, value: int, limit: int = RANGE) -> Path:
    directory = root / path
    directory.mkdir(parents=True)
    (directory / "name").write_text(f"{name}\n")
    (directory / "max_energy_range_uj").write_text(f"{limit}\n")
    (directory / "energy_uj").write_text(f"{value}\n")
    return directory / "energy_uj"


@pytest.mark.parametrize(
    ("values", "joules"),
    [
        ([100, 400], 300e-6),
        ([100, 100], 0.0),
        ([900, 100], 200e-6),  # wrapped
        ([100, 999, 50, 900, 0], 1900e-6),  # twice, seen in between
    ],
)
def test_counters_wrap(tmp_path: Path, values: list[int], joules: float) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", values[0])
    rapl = Rapl(tmp_path, poll_seconds=1e6)
    for value in values[1:]:
        counter.write_text(f"{value}\n")
        found = rapl.read()
    rapl.close()
    assert rapl.missing is None and found["package-0"] == pytest.approx(joules)


def test_a_wrap_that_nobody_asked_about_is_seen(tmp_path: Path) -> None:
    """The counter goes round twice between two reads; in the background it is read more often."""
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    rapl = Rapl(tmp_path, poll_seconds=0.01)
    own = rapl._counters["package-0"]
    for value in (600, 200, 800, 400):
        scratch = counter.with_suffix(".new")
        scratch.write_text(f"{value}\n")
        scratch.replace(counter)
        for _ in range(1000):
            if own.last == value:
                break
            sleep(0.01)
    assert rapl.read()["package-0"] == pytest.approx(2400e-6)
    rapl.close()


def test_what_is_in_a_package_is_not_counted_twice(tmp_path: Path) -> None:
    for path, name in (
        ("intel-rapl:0", "package-0"),
        ("intel-rapl:0:0", "core"),
        ("intel-rapl:0:1", "uncore"),
        ("intel-rapl:0:2", "dram"),
        ("intel-rapl:1", "package-1"),
        ("intel-rapl:2", "psys"),
        ("intel-rapl-mmio:0", "package-0"),
    ):
        zone(tmp_path, path, name, 5)
    rapl = Rapl(tmp_path)
    assert sorted(rapl.read()) == ["package-0", "package-0 dram", "package-1"]
    rapl.close()


def test_no_rail_is_no_zero(tmp_path: Path) -> None:
    rapl = Rapl(tmp_path)
    assert rapl.read() == {} and str(tmp_path) in str(rapl.missing)


def test_a_rail_for_root_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 5)
    read = Path.read_text

    def refused(path: Path, *arguments: object, **options: object) -> str:
        if path == counter:
            raise PermissionError(13, "Permission denied")
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", refused)
    rapl = Rapl(tmp_path)
    assert rapl.read() == {} and rapl.missing == f"{counter} can be read by root only"


SAMPLES = """Machine model: Mac16,8

*** Sampled system activity (Mon Mar  2 10:00:00 2026 +0100) (500.00ms elapsed) ***

**** Processor usage ****
P0-Cluster HW active frequency: 2000 MHz
CPU Power: 1000 mW
GPU Power: 200 mW
ANE Power: 0 mW
Combined Power (CPU + GPU + ANE): 1200 mW

*** Sampled system activity (Mon Mar  2 10:00:01 2026 +0100) (1500.00ms elapsed) ***

CPU Power: 2000 mW
GPU Power: 0.4 W
ANE Power: 4000 mW
Combined Power (CPU + GPU + ANE): 6400 mW
GPU Power: 0.4 W of them idle
"""


def test_powermetrics_text() -> None:
    sums: dict[str, float] = {}
    for rail, joules in parse_powermetrics(SAMPLES.splitlines()):
        sums[rail] = sums.get(rail, 0.0) + joules
    assert sums == pytest.approx({"CPU": 0.5 + 3.0, "GPU": 0.1 + 0.6, "ANE": 0.0 + 6.0})


def command(text: str, code: int = 0) -> list[str]:
    script = f"import sys, time; print({text!r}, flush=True); time.sleep({5 if text else 0})"
    return [sys.executable, "-c", f"{script}; sys.exit({code})"]


def test_powermetrics_is_followed_and_ended() -> None:
    found = PowerMetrics(command(SAMPLES), start_seconds=60)
    assert found.missing is None
    for _ in range(1000):
        if found.read().get("ANE"):
            break
        sleep(0.01)
    assert found.read()["ANE"] == pytest.approx(6.0)
    found.close()
    assert found._process is not None and found._process.poll() is not None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(command("", 1), "needs root"), (["/no/such/powermetrics"], "cannot be run")],
)
def test_powermetrics_that_is_refused(arguments: list[str], reason: str) -> None:
    found = PowerMetrics(arguments, start_seconds=60)
    assert found.read() == {} and reason in str(found.missing)


class Rails:
    """A joule of "package-0" every time it is read."""

    missing: str | None = None

    def __init__(self) -> None:
        self.joules = 0.0

    def read(self) -> dict[str, float]:
        self.joules += 1
        return {"package-0": self.joules}

    def close(self) -> None: ...


def test_a_meter_takes_the_difference() -> None:
    counted = iter([100, 350])
    meter = Meter(Rails(), lambda: next(counted))
    start = meter.now()
    busy = threading.Thread(target=lambda: sum(range(2_000_000)))  # other threads' time counts
    busy.start()
    busy.join()
    used = meter.since(start)
    assert used.joules == {"package-0": 1.0} and used.cycles == 250 and used.cpu_seconds > 0


def test_uses_add_up() -> None:
    both = Use({"a": 1.0}, 2.0, 3) + Use({"a": 4.0}, 5.0, 6)
    assert both == Use({"a": 5.0}, 7.0, 9)
    assert (both + Use({}, 0.0, None)) == Use({}, 7.0, None)


def test_cycles_grow_where_they_are_counted() -> None:
    read = process_cycles()
    before = read()
    sum(range(1_000_000))
    after = read()
    assert (before is None) == (after is None)
    assert before is None or after - before > 100_000


WORKLOAD = Workload(
    vocabulary=2048, batch_size=2, prompt_tokens=5, generation_tokens=2, prefill_step_size=4
)


def measured(joules: dict[str, float], cycles: int | None) -> Measurement:
    predictions = mx.zeros((2, 5))
    use = {"prefill": Use(joules, 0.5, cycles), "decode": Use(joules, 0.25, cycles)}
    trials = {side: [Trial(1.0, [1.0, 1.0], predictions, use)] * 2 for side in ("stock",)}
    return Measurement({**trials, "replaced": []})


def test_a_token_of_each_phase() -> None:
    found = energy_report.report(measured({"package-0": 30.0}, 10**9), WORKLOAD, None)
    assert found["prefill"]["stock"] == {  # two trials of two prompts of five tokens
        "joules_per_token": {"package-0": pytest.approx(3.0)},
        "cpu_seconds_per_token": pytest.approx(0.05),
        "cycles_per_token": pytest.approx(1e8),
    }
    assert found["decode"]["stock"]["joules_per_token"] == {"package-0": pytest.approx(7.5)}
    assert found["prefill"]["replaced"] is None
    text = energy_report.as_text(found)
    assert "J package-0" in text and "7.5" in text and "replaced" not in text


def test_a_rail_that_is_not_there_is_said() -> None:
    found = energy_report.report(measured({}, None), WORKLOAD, "no RAPL package")
    assert found["prefill"]["stock"]["joules_per_token"] is None
    text = energy_report.as_text(found)
    assert "rail not available: no RAPL package" in text and "not available" in text


def test_a_measured_model(tiny_model_path: Path) -> None:
    model, _ = mlx_lm.load(str(tiny_model_path))
    rails = Rails()
    measurement = measure(Replaced(model, "auto"), WORKLOAD, 1, Meter(rails))
    for trials in measurement.trials.values():
        for trial in trials:
            assert trial.use["prefill"].joules == trial.use["decode"].joules == {"package-0": 1.0}
            assert trial.use["prefill"].cpu_seconds > 0
    assert measure(Replaced(model, "auto"), WORKLOAD, 1).trials["replaced"][0].use == {}


def test_this_system_says_what_it_has() -> None:
    found = energy.rails()
    assert bool(found["rails"]) == (found["missing"] is None)
