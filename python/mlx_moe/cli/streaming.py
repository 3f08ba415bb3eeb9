"""Options of commands that can leave a model's experts on disk."""

import argparse
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument
from ..expert_memory import ExpertMemory

# Stock commands that only run the model; the others train, convert or save its weights.
COMMANDS = ("generate", "chat", "server", "benchmark", "cache_prompt", "perplexity", "evaluate")
STEP = "--prefill-step-size"
STEP_SIZE = 4096  # twice mlx-lm's: a prompt reads most experts once for each step

log = logging.getLogger("mlx_moe")


def add_memory_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--expert-memory",
        type=limit,
        metavar="SIZE|SHARE%|auto",
        help="Leave the experts in the model's files and keep at most so much of them in memory, "
        "such as 8GB or 25%% of all; auto: what is free",
    )
    parser.add_argument(
        "--expert-policy",
        type=policy,
        metavar="NAME",
        help="Which experts go first: lru, lfu, lfu:TOKENS, or auto, what would have been best for "
        "the tokens decoded last (default: auto)",
    )


def limit(text: str) -> str:
    return _checked(text, ExpertMemory(text))


def policy(text: str) -> str:
    return _checked(text, ExpertMemory(1, text))


def _checked(text: str, memory: ExpertMemory) -> str:
    try:
        memory.check()
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def memory_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What `replace_moe_layers` takes of these options."""
    if args.expert_memory is None:
        if args.expert_policy is not None:
            raise InvalidArgument("--expert-policy goes with --expert-memory")
        return {}
    return {"expert_memory": ExpertMemory(args.expert_memory, args.expert_policy or "auto")}


def load_replaced(args: argparse.Namespace) -> tuple[Any, Any, Path]:
    """The model of a command of ours, replaced as its options say, its tokenizer and directory."""
    from ..loading import load_stock, replace_layers

    memory = memory_arguments(args)
    loaded = load_stock(args.model, args.trust_remote_code, lazy=bool(memory))
    model, tokenizer, _, directory = loaded
    files = {"checkpoint": directory} if memory else {}
    replaced = replace_layers(model, args.backend, memory | files)
    if memory:
        replaced.read()
    return model, tokenizer, directory


def stock_arguments(command: str, arguments: Sequence[str]) -> list[str]:
    """The arguments of a stock command, with longer prefill steps where it has them.

    Args:
        command: "mlx_lm.server", or "mlx_lm" with "server" as the first argument.

    Raises InvalidArgument for a command that needs all weights.
    """
    own, rest = ([], list(arguments)) if "." in command else (arguments[:1], arguments[1:])
    name = "".join(own) or command.rpartition(".")[2]
    if name not in COMMANDS:
        raise InvalidArgument(
            f"mlx_lm.{name} needs all weights in memory, so it does not go with --expert-memory; "
            f"these do: {', '.join(COMMANDS)}"
        )
    return [*own, *longer_steps(name, rest)]


def longer_steps(name: str, arguments: Sequence[str]) -> list[str]:
    """A stock command line with STEP_SIZE, where it has STEP and does not say it itself."""
    if not has_steps(name) or any(is_step(argument) for argument in arguments):
        return list(arguments)
    log.info("prompts are read %d tokens at a time (%s)", STEP_SIZE, STEP)
    return [STEP, str(STEP_SIZE), *arguments]


def has_steps(name: str) -> bool:
    """Whether the installed mlx-lm's command knows STEP: it differs by version, and only the
    source tells without running the command."""
    found = find_spec(f"mlx_lm.{name}")
    return found is not None and found.origin is not None and STEP in Path(found.origin).read_text()


def is_step(argument: str) -> bool:
    flag = argument.partition("=")[0]  # argparse takes any beginning that is no other option's
    return len(flag) > len("--prefill-") and STEP.startswith(flag)
