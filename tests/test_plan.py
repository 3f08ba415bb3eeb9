"""Plan files: a round trip, and whatever is changed in one is refused by its name."""

import copy
import errno
import json
import os
from dataclasses import replace

import pytest
from plan_data import skewed
from test_cost import with_numbers

from mlx_moe.devices import load_device
from mlx_moe.errors import CorruptFile, IdentityMismatch, InvalidArgument
from mlx_moe.identity import ModelIdentity
from mlx_moe.plan import Plan
from mlx_moe.planner import make_plan

LARGE = 1 << 45


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two layers with groups of several tiers, splits and a shared expert."""
    made = skewed(experts=8, hidden=4096, inner=14336, shared=128)
    return make_plan(made, "m4-pro", memory=LARGE, overflow=0.02, force_hot=0.9)


@pytest.fixture(scope="module")
def cpu_plan() -> Plan:
    device = with_numbers(load_device("cpu"), packed_speedup=2.0)
    return make_plan(skewed(), device, memory=200_000_000)


def test_a_plan_reads_back_as_it_was(plan: Plan, cpu_plan: Plan, tmp_path) -> None:
    for one in (plan, cpu_plan):
        one.save(tmp_path / "plan.json")
        back = Plan.load(tmp_path / "plan.json")
        assert back == one and back.sha256 == one.sha256
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert plan.sha256 != cpu_plan.sha256


def test_layers_are_found_by_name(plan: Plan) -> None:
    assert plan.layer("model.layers.1.mlp.switch_mlp") is plan.layers[1]
    with pytest.raises(InvalidArgument, match=r"no layer 'model\.x'"):
        plan.layer("model.x")


def test_a_group_has_the_layers_tiers_up_to_its_own(plan: Plan) -> None:
    for layer in plan.layers:
        assert len(layer.tiers) > 1 and layer.shared is not None
        for group in layer.groups:
            assert layer.capacities(group) == tuple(t for t in layer.tiers if t <= group.tier)
        (beside,) = layer.shared.groups
        assert layer.capacities(beside) == (*(t for t in layer.tiers if t < 512), 512)


def test_another_model_is_refused_by_name(plan: Plan) -> None:
    plan.check_model(replace(plan.identity))
    with pytest.raises(IdentityMismatch, match=r"'made-up'.*'other'"):
        plan.check_model(ModelIdentity("other", config="1" * 64))


def layer(data):
    return data["layers"][0]


def group(data, number=0):
    return layer(data)["groups"][number]


# what is changed, and what the error names
MUTATIONS = {
    "no format": (lambda d: d.pop("format"), "format|not a mlx_moe.plan"),
    "another format": (lambda d: d.update(format="mlx_moe.calibration"), "not a mlx_moe.plan"),
    "version": (lambda d: d.update(version=2), "version is 2"),
    "unknown key": (lambda d: d.update(more=1), r"unknown \['more'\]"),
    "missing key": (lambda d: d.pop("chunk"), r"\['chunk'\] missing"),
    "chunk": (lambda d: d.update(chunk=0), "^chunk"),
    "chunk is true": (lambda d: d.update(chunk=True), "^chunk"),
    "weights": (lambda d: d.update(weights="int4"), "^weights"),
    "executor": (lambda d: d.update(executor="cpu"), "^executor"),
    "identity": (lambda d: d.update(identity={"name": 1}), "identity"),
    "device": (lambda d: d["device"]["numbers"].pop("cold_flops"), "device.numbers"),
    "device number": (
        lambda d: d["device"]["numbers"]["cold_flops"].update(value=-1),
        "device.numbers.cold_flops",
    ),
    "options": (lambda d: d.update(options=[]), "^options"),
    "layers": (lambda d: d.update(layers={}), "^layers"),
    "a layer": (lambda d: d["layers"].append(3), r"layers\[2\]"),
    "two of a name": (lambda d: layer(d).update(name=d["layers"][1]["name"]), "name .* twice"),
    "fact": (lambda d: layer(d).update(hidden=-4), r"layers\[0\].*hidden"),
    "kind": (lambda d: layer(d).update(kind="conv"), r"layers\[0\].*kind"),
    "layer weights": (
        lambda d: layer(d)["weights"].pop("bits"),
        r"layers\[0\].weights.bits is missing",
    ),
    "unknown layer key": (lambda d: layer(d).update(speed=1), r"layers\[0\]: unknown"),
    "tiers not ascending": (lambda d: layer(d)["tiers"].reverse(), r"layers\[0\].tiers"),
    "tier not of 32": (lambda d: layer(d)["tiers"].insert(0, 7), r"layers\[0\].tiers"),
    "tier beyond a chunk": (lambda d: layer(d)["tiers"].append(544), r"layers\[0\].tiers: 544"),
    "chunk beyond all": (lambda d: d.update(chunk=1 << 21), "chunk: .* at most 1048576"),
    "tier of 0": (lambda d: layer(d)["tiers"].insert(0, 0), r"layers\[0\].tiers"),
    "static_from": (lambda d: layer(d).update(static_from=0), r"layers\[0\].static_from"),
    "no static_from": (lambda d: layer(d).update(static_from=None), r"layers\[0\].static_from"),
    "packed": (lambda d: layer(d).update(packed=[1]), r"layers\[0\].packed"),
    "packed beyond": (lambda d: layer(d).update(packed=[99]), r"layers\[0\].packed"),
    "reason": (lambda d: layer(d).update(reason=7), r"layers\[0\].reason"),
    "expected": (lambda d: layer(d)["expected"].update(fill="full"), r"expected.fill"),
    "expected nan": (lambda d: layer(d)["expected"].update(fill=float("nan")), r"expected.fill"),
    "expected beyond": (lambda d: layer(d)["expected"].update(fill=10**400), r"expected.fill"),
    "expected missing": (lambda d: layer(d)["expected"].pop("gini"), r"expected: \['gini'\]"),
    "group": (lambda d: layer(d)["groups"].append(None), r"layers\[0\].groups\[\d+\]"),
    "group id": (lambda d: group(d).update(id="../x"), r"groups\[0\].id"),
    "group id twice": (lambda d: group(d).update(id=group(d, 1)["id"]), "group id .* twice"),
    "group key": (lambda d: group(d).pop("parts"), r"groups\[0\]: \['parts'\] missing"),
    "expert twice": (lambda d: group(d)["experts"].append(group(d)["experts"][0]), r"\.experts"),
    "expert beyond": (lambda d: group(d).update(experts=[8]), r"groups\[0\].experts"),
    "expert below": (lambda d: group(d).update(experts=[-1]), r"groups\[0\].experts"),
    "no experts": (lambda d: group(d).update(experts=[]), r"groups\[0\].experts"),
    "tier of none": (
        lambda d: [group(d, part).update(tier=1024) for part in (0, 1)],
        r"groups\[0\].tier: 1024 is not one of",
    ),
    "tier of one part": (lambda d: group(d).update(tier=1024), r"have parts .* and tiers"),
    "split": (lambda d: group(d).update(split=[0, 7000]), "do not cover"),
    "split beyond": (lambda d: group(d).update(split=[0, 14400]), r"groups\[0\].split"),
    "split backwards": (lambda d: group(d).update(split=[9, 9]), r"groups\[0\].split"),
    "split of three": (lambda d: group(d).update(split=[0, 1, 2]), r"groups\[0\].split"),
    "parts": (lambda d: group(d).update(parts=3), "parts"),
    "a part gone": (lambda d: layer(d)["groups"].pop(0), "do not cover"),
    "expert in two groups": (
        lambda d: layer(d)["groups"].append(
            group(d) | {"id": "x", "experts": [*group(d)["experts"], 7 - group(d)["experts"][0]]}
        ),
        "two groups|twice|do not cover",
    ),
    "spill_limit": (lambda d: group(d).update(spill_limit=1.5), r"groups\[0\].spill_limit"),
    "shared": (lambda d: layer(d)["shared"].pop("inner"), r"layers\[0\]: shared|\.shared"),
    "shared expert": (
        lambda d: layer(d)["shared"]["groups"][0].update(experts=[1]),
        r"shared.groups\[0\].experts",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_was_changed_is_named(plan: Plan, name: str, tmp_path) -> None:
    change, named = MUTATIONS[name]
    data = copy.deepcopy(plan.to_json())
    change(data)
    with pytest.raises(CorruptFile, match=named):
        Plan.from_json(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(CorruptFile, match=r"plan\.json: .*; plan again"):
        Plan.load(path)


def test_cpu_plans_have_no_programs(plan: Plan, cpu_plan: Plan) -> None:
    data = cpu_plan.to_json()
    data["layers"][0]["groups"] = [
        {"id": "a", "experts": [0], "tier": 32, "split": [0, 768], "parts": 1, "spill_limit": 0}
    ]
    data["layers"][0]["tiers"] = [32]
    with pytest.raises(CorruptFile, match=r"layers\[0\].groups: executor cpu"):
        Plan.from_json(data)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"plan"', "\x00\xff", "{}"])
def test_files_that_are_no_plan(text: str, tmp_path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptFile, match=r"plan\.json"):
        Plan.load(path)


def test_a_plan_that_is_not_there(tmp_path) -> None:
    with pytest.raises(InvalidArgument, match="there is no plan"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_that_cannot_be_written(plan: Plan, tmp_path) -> None:
    with pytest.raises(InvalidArgument, match="cannot write"):
        plan.save(tmp_path / "none" / "plan.json")


def test_a_full_disk_leaves_what_was_there(
    plan: Plan, cpu_plan: Plan, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidArgument, match="No space left"):
        cpu_plan.save(tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert Plan.load(tmp_path / "plan.json") == plan
