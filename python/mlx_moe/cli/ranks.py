"""Commands that a launcher (`mlx.launch -n 2 mlx_moe ...`) started on several ranks."""

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from ..distributed import SPLITS, TIMEOUT, Ranks, join
from ..errors import MoEError, RankLost

BACKENDS = ("[ring]", "[jaccl]", "[mpi]", "[nccl]")  # as MLX begins what it says of a lost peer


def add_rank_options(parser: argparse._ActionsContainer) -> None:
    """What only counts where several ranks were launched."""
    parser.add_argument(
        "--rank-split",
        choices=SPLITS,
        default="auto",
        help="On several ranks: experts that are cut, a slice on each rank; auto: those for which "
        "one rank would wait for another (default: auto)",
    )
    parser.add_argument(
        "--rank-counts",
        metavar="FILE",
        help="On several ranks: a calibration.npz, to spread the experts by how often they are "
        "used (default: all alike)",
    )
    parser.add_argument(
        "--rank-timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help="On several ranks: how long to wait for one that says nothing before ending with an "
        f"error (default: {TIMEOUT:g})",
    )


@contextmanager
def launched_ranks(args: argparse.Namespace, without: dict[str, object]) -> Iterator[Ranks | None]:
    """The ranks, or None where this process is the only one. Others than rank 0 print errors only,
    and an error here ends the others.

    without: options that several ranks cannot have, by name, with what was given.
    """
    ranks = join(split=args.rank_split, counts=args.rank_counts, timeout=args.rank_timeout)
    if ranks is None:
        yield None
        return
    try:
        given = [name for name, value in without.items() if value]
        if given:
            raise MoEError(f"{', '.join(given)} cannot be used on several ranks; leave it away")
        options = {key: value for key, value in vars(args).items() if key != "verbose"}
        ranks.agree({f"--{key.replace('_', '-')}": repr(value) for key, value in options.items()})
        with _quiet_unless(ranks.first):
            yield ranks
            ranks.finish()
    except RuntimeError as error:
        ranks.close(str(error))
        if str(error).startswith(BACKENDS):
            raise RankLost(ranks.watchdog.lost("generation", str(error))) from error
        raise
    except BaseException as error:
        ranks.close(str(error) or type(error).__name__)
        raise


@contextmanager
def _quiet_unless(first: bool) -> Iterator[None]:
    if first:
        yield
        return
    logging.getLogger("mlx_moe").setLevel(logging.ERROR)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield
