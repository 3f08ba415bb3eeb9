"""What the doctor found, as text."""

from typing import Any

from .machine import as_size
from .tables import table

WHERE = {
    "directory": "a directory",
    "cache": "in the hub's cache on this machine",
    "hub": "on the hub, not downloaded yet",
}


def as_text(report: dict[str, Any]) -> str:
    parts = [_facts(_machine(report))]
    model = report["model"]
    if model is not None:
        parts += [_facts(_model(model)), _modes(model)]
        if model["notes"]:
            parts.append("\n".join(f"note: {note}" for note in model["notes"]))
    if report["problems"]:
        parts.append("\n".join(f"problem: {problem}" for problem in report["problems"]))
    if report["next"]:
        parts.append("\n".join(["next:", *(f"    {line}" for line in report["next"])]))
    return "\n\n".join(parts)


def _facts(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _machine(report: dict[str, Any]) -> list[tuple[str, str]]:
    machine, energy = report["machine"], report["energy"]
    memory = _size(machine["memory_bytes"])
    if machine["available_bytes"] is not None:
        memory += f", {_size(machine['available_bytes'])} available"
    if machine["device_memory_bytes"] is not None:
        memory += f"; MLX advises {_size(machine['device_memory_bytes'])} for models"
    quota = machine["cpu_quota"]
    bound = "" if quota is None else f", bounded to {quota:g} by a control group"
    kernels = machine["isa"] or machine["isa_error"] or "none"
    if machine["isa"]:
        threads = machine["threads"]
        kernels += f" (of {', '.join(machine['isas'])}), {_count(threads, 'thread')}"
    device = machine["device"] or "cannot be imported"
    return [
        ("system", machine["system"]),
        ("chip", f"{machine['chip']}, {_count(machine['processors'], 'processor')}{bound}"),
        ("memory", memory),
        ("MLX", f"{machine['mlx'] or 'not installed'}, computes on: {device}"),
        ("mlx-lm", machine["mlx_lm"] or "not installed"),
        (
            "mlx_moe",
            f"{machine['mlx_moe']}, {machine['wheel']}, Python {machine['python']}",
        ),
        ("kernels", kernels),
        ("Core ML", machine["coreml"] or "available"),
        ("energy", ", ".join(energy["rails"]) or f"not available: {energy['missing']}"),
        ("profile", _profile(report["profile"])),
        ("cache", report["cache"]),
    ]


def _profile(profile: dict[str, Any] | None) -> str:
    if profile is None:
        return "built-in; `mlx_moe tune` measures this machine"
    if "error" in profile:
        return f"unreadable: {profile['error']}; run `mlx_moe tune` again"
    return f"{profile['description']}, {profile['path']}"


def _model(model: dict[str, Any]) -> list[tuple[str, str]]:
    family = model["family"]
    known = "known to the installed mlx-lm" if family["known"] else "not known"
    named = family["model_type"]
    if family["name"] != named:
        named += f" ({family['name']})"
    rows = [
        ("model", f"{model['name']}: {WHERE[model['where']]}, {as_size(model['bytes'])}"),
        ("family", f"{named}, {known}"),
    ]
    for group in model["experts"]:
        sizes = f"{group['hidden']} x {group['inner']}" if group["hidden"] else "of unknown size"
        choice = "" if model["top_k"] is None else f", {model['top_k']} a token"
        rows.append(
            (
                "experts",
                f"{_count(group['layers'], 'layer')} of {group['experts']}{choice}, {sizes}, "
                f"{group['format']}: {as_size(group['layers'] * group['bytes'])}",
            )
        )
    rows.append(("supported", "yes" if model["supported"] else "no"))
    if model["where"] != "directory" and model["free_disk_bytes"] is not None:
        rows.append(("disk", f"{as_size(model['free_disk_bytes'])} free where it goes"))
    return rows


def _modes(model: dict[str, Any]) -> str:
    fits = {True: "yes", False: "no", None: "?"}
    rows = [
        [
            mode["name"],
            as_size(mode["memory"]),
            as_size(mode["disk"]),
            fits[mode["fits"]],
            "yes" if mode["missing"] is None else "no",
        ]
        for mode in model["modes"]
    ]
    notes = [
        f"{mode['name']}: {mode['note']}" + (f" ({mode['missing']})" if mode["missing"] else "")
        for mode in model["modes"]
    ]
    header = ["way", "memory", "disk", "fits", "to be had"]
    return "\n".join([table(header, rows), *notes, "The text's cache and activations come on top."])


def _size(size: int | None) -> str:
    return "unknown" if size is None else as_size(size)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
