"""What this machine can do, whether a model is supported, and what to do next."""

import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import cache, top_k, tune_profile
from .doctor_experts import ExpertLayer, expert_layers
from .doctor_families import Family, family_of, like, models_directory
from .doctor_files import ModelFiles, read_model
from .doctor_memory import Mode, modes
from .energy import rails
from .errors import CorruptFile
from .machine import Machine, as_size, has_packed_copies, this_machine

GENERATE = "mlx_moe generate --model {} --prompt 'In the beginning'"
CONVERTIBLE = ("float32", "float16", "bfloat16")


def doctor(model: str | None = None) -> dict[str, Any]:
    """What is found, to be printed or written as JSON; never imports mlx_lm or reads weights.

    Args:
        model: a model directory or a Hugging Face repository id; None for the machine alone.

    Returns:
        machine, profile, energy, model (None without one), problems and next (commands);
        `ok` says that nothing is in the way.

    Raises as `read_model`.
    """
    machine = this_machine()
    problems = machine_problems(machine)
    profile = _profile()
    report: dict[str, Any] = {
        "machine": machine.as_dict(),
        "profile": profile,
        "cache": str(cache.cache_dir()),
        "energy": rails(),
        "model": None,
        "problems": problems,
    }
    if model is None:
        report["next"] = _next_without(machine, profile)
    else:
        found = examine(model, machine)
        problems += found["problems"]
        report["model"] = found
        report["next"] = _next(found, machine)
    report["ok"] = not problems
    return report


def machine_problems(machine: Machine) -> list[str]:
    found = []
    if machine.mlx is None or machine.device is None:
        found.append("MLX is not installed or cannot be imported: pip install mlx-npumoe")
    if machine.mlx_lm is None:
        found.append("mlx-lm is not installed: pip install mlx-lm")
    if machine.isa_error is not None:
        found.append(machine.isa_error)
    quota, threads = machine.cpu_quota, machine.threads
    if quota is not None and threads is not None and quota < threads:
        found.append(
            f"a control group allows {quota:g} processors' worth of time, and the kernels use "
            f"{threads} threads, which then wait for each other: set "
            f"MLX_MOE_NUM_THREADS={max(1, int(quota))}"
        )
    return found


def examine(name: str, machine: Machine) -> dict[str, Any]:
    """Whether a model is supported, what its experts are, and what it takes."""
    files = read_model(name)
    directory = models_directory()
    family = family_of(files.config, directory)
    layers = expert_layers(files.tensors)
    problems = [*files.problems, *_problems(family, layers, directory)]
    chosen = top_k.of_config(files.config)
    packed = machine.device == "cpu" and has_packed_copies()
    memory = machine.device_memory_bytes or machine.memory_bytes
    ways = modes(files.bytes, layers, chosen, memory, packed, machine.coreml)
    return {
        "name": name,
        "where": files.where,
        "bytes": files.bytes,
        "free_disk_bytes": _free(files),
        "family": asdict(family),
        "supported": not problems,
        "top_k": chosen,
        "experts": _groups(layers),
        "expert_bytes": sum(layer.bytes for layer in layers),
        "notes": _notes(family, layers, machine),
        "problems": problems,
        "modes": [mode.as_dict() for mode in ways],
    }


def _problems(family: Family, layers: list[ExpertLayer], models: Path | None) -> list[str]:
    found = []
    if family.model_type is None:
        raise CorruptFile("config.json has no model_type: mlx-lm cannot tell what model this is")
    if not family.known and models is not None:
        near = like(family.model_type, models)
        others = f"; it knows {', '.join(near)}" if near else ""
        found.append(
            f"the installed mlx-lm has no family {family.model_type!r}{others}: a newer one may "
            "(pip install -U mlx-lm)"
        )
    unread = [layer for layer in layers if layer.problem]
    if unread:
        found.append(
            f"{len(unread)} of {len(layers)} expert layers are in a format that the kernels do "
            f"not read: {unread[0].problem}"
        )
    return found


def _notes(family: Family, layers: list[ExpertLayer], machine: Machine) -> list[str]:
    found = []
    if not layers:
        on_cpu = machine.device == "cpu"
        rest = "its dense layers and attention are replaced" if on_cpu else "nothing is replaced"
        found.append(f"no expert layers: {rest}")
    if family.own_code:
        found.append(
            f"brings its own code ({family.name}), which --trust-remote-code runs; its expert "
            "layers are recognised by their shape when it is loaded"
        )
    elif layers and family.known and not family.experts:
        found.append(
            f"mlx-lm's {family.name} has no switch layers of its own: its experts are recognised "
            "by their shape when it is loaded, or left to stock"
        )
    foreign = [layer for layer in layers if not layer.stacked]
    if foreign:
        plain = all(layer.format in (*CONVERTIBLE, "mxfp4") for layer in foreign)
        found.append(
            "a checkpoint in its original layout: mlx-lm stacks the experts while it loads it"
            if plain
            else f"a checkpoint in its original layout with {foreign[0].format} experts: whether "
            "mlx-lm converts that shows when it loads it"
        )
    return found


def _groups(layers: list[ExpertLayer]) -> list[dict[str, Any]]:
    """The layers that are alike, together."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for layer in layers:
        facts = asdict(layer)
        name = facts.pop("name")
        facts.pop("problem")
        group = groups.setdefault(tuple(facts.values()), {"layers": 0, "first": name, **facts})
        group["layers"] += 1
    return list(groups.values())


def _free(files: ModelFiles) -> int | None:
    """Bytes left where the model is, or would be."""
    path = files.directory
    if path is None:
        from huggingface_hub.constants import HF_HUB_CACHE

        path = Path(HF_HUB_CACHE)
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _profile() -> dict[str, Any] | None:
    """The tuned profile of this machine, if there is one."""
    path = tune_profile.profile_path()
    try:
        device = tune_profile.load()
    except CorruptFile as error:
        return {"path": str(path), "error": str(error)}
    if device is None:
        return None
    return {"path": str(path), "executor": device.executor, "description": device.description}


def _next_without(machine: Machine, profile: dict[str, Any] | None) -> list[str]:
    if machine.mlx_lm is None or machine.mlx is None:
        return ["pip install mlx-npumoe"]
    found = ["mlx_moe doctor MODEL    # a model directory or a Hugging Face repository id"]
    if profile is None:
        found.append("mlx_moe tune    # measures this machine for `mlx_moe plan`")
    return found


def _next(model: dict[str, Any], machine: Machine) -> list[str]:
    """Commands: the first gets the model to run here, the others go on from there."""
    name = model["name"]
    if not model["family"]["known"]:
        return ["pip install -U mlx-lm"]
    if model["problems"]:
        return [f"hf download {name}"] if model["where"] == "cache" else []
    ways = {mode["name"]: mode for mode in model["modes"]}
    free = model["free_disk_bytes"]
    if model["where"] == "hub" and free is not None and free < model["bytes"]:
        return [f"# free {as_size(model['bytes'] - free)} of disk space, or HF_HOME=/other/disk"]
    if ways["replaced"]["fits"] is False:
        return _smaller(model, ways)
    found = [GENERATE.format(name)]
    if model["experts"]:
        found.append(f"mlx_moe benchmark --model {name}")
    if model["experts"] and machine.coreml is None:
        found += [
            f"mlx_moe calibrate --model {name} --data TEXT -o calibration.npz",
            "mlx_moe plan --calibration calibration.npz -o plan.json",
        ]
    return found


def _smaller(model: dict[str, Any], ways: dict[str, dict[str, Any]]) -> list[str]:
    """What can be done where the weights do not fit."""
    name = model["name"]
    streaming = ways.get("expert streaming")
    if streaming and streaming["missing"] is None and streaming["fits"]:
        bank = streaming["memory"] - (model["bytes"] - model["expert_bytes"])
        size = f"{math.ceil(bank / 1e8) / 10}GB" if bank >= 1e9 else f"{math.ceil(bank / 1e6)}MB"
        return [f"{GENERATE.format(name)} --expert-memory {size}"]
    formats = {group["format"] for group in model["experts"]}
    if formats <= set(CONVERTIBLE):
        return [f"mlx_lm.convert --hf-path {name} -q    # to 4 bits, about a quarter of the size"]
    return ["# the weights do not fit this machine's memory: take a smaller model, or fewer bits"]


__all__ = ["Mode", "doctor", "examine", "machine_problems"]
