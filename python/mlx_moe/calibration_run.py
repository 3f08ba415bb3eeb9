"""Run a model over text and count where its tokens go."""

import hashlib
import os
from pathlib import Path
from time import monotonic
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from .calibration import QUANTILES, Calibration, LayerStatistics, Source
from .calibration_state import AGAIN, Progress, load_state, save_state, state_path
from .corpus import Corpus, Document, TokenLists, parts
from .counting import LayerCounts
from .defaults import CHUNK, DOCUMENT, SAVE_EVERY
from .durable import scratch_path
from .errors import BadData, InvalidArgument, UnsupportedLayer
from .facts import layer_facts
from .identity import identity_of_model
from .interrupt import Interrupts
from .layers import Layer, Observer
from .observe import observed
from .progress import progress_bar


def calibrate(
    model: nn.Module,
    tokens: Any,
    *,
    chunk: int = CHUNK,
    out: str | Path | None = None,
    resume: bool = True,
    max_tokens: int | None = None,
    max_document: int = DOCUMENT,
    files: str | Path | None = None,
    backend: str = "auto",
    save_every: float = SAVE_EVERY,
    progress: bool = False,
) -> Calibration:
    """Prefill `model` with documents, chunk by chunk, and count the routing of each expert layer.

    Expert layers run replaced; those that were not are put back. With `out`, the counts are kept
    beside it every `save_every` seconds and whenever this ends early, and a later call with the
    same model, documents and options goes on from there: its result is that of one whole run.

    Args:
        model: from `mlx_lm.load` or `mlx_moe.load`.
        tokens: documents, each a sequence of token ids (list, numpy or MLX); or one such
            sequence; or a `Corpus`, such as `TextFiles`.
        chunk: prefill tokens at a time, which is what loads are counted over.
        out: where to write the calibration (.npz).
        resume: go on from what an earlier call left beside `out`; False starts over.
        max_tokens: stop after so many.
        max_document: longer documents are cut into parts of so many tokens, and each is
            prefilled alone.
        files: the model's directory, by which it is known again more surely.
        backend: for layers that are not replaced yet, as for `replace_moe_layers`.
        save_every: seconds between saves.
        progress: show a progress bar on stderr.

    Returns:
        The `Calibration`, which was also written to `out`.

    Raises:
        InvalidArgument: an argument cannot be; what was left beside `out` is of other options
            or other data.
        IdentityMismatch: what was left beside `out` is of another model.
        NoMoELayers: the model has no expert layers.
        BadData: there are no tokens, or a file of a corpus cannot be read.
    """
    for name, value in (
        ("chunk", chunk),
        ("max_tokens", max_tokens),
        ("max_document", max_document),
    ):
        if value is not None and value < 1:
            raise InvalidArgument(f"{name} is {value}; expected a positive number of tokens")
    if out is not None and not Path(out).absolute().parent.is_dir():
        raise InvalidArgument(f"{out}: there is no such directory to write it in")
    if out is not None and not os.access(Path(out).absolute().parent, os.W_OK):
        raise InvalidArgument(f"{out}: its directory cannot be written in")
    corpus = tokens if isinstance(tokens, Corpus) else TokenLists(tokens)
    run = Run(model, corpus, chunk, max_tokens, max_document, files)
    if out is not None:
        run.keep(state_path(out), resume, save_every)
    with (
        observed(model, run.observers(), backend),
        progress_bar(progress, unit="tok", unit_scale=True) as bar,
    ):
        run.run(bar)
    calibration = run.result()
    if out is not None:
        calibration.save(out)
        for left in (state_path(out), scratch_path(state_path(out))):
            left.unlink(missing_ok=True)
    return calibration


class Run:
    """One calibration: the counts, how far it is, and where that is kept."""

    def __init__(
        self,
        model: nn.Module,
        corpus: Corpus,
        chunk: int,
        max_tokens: int | None,
        max_document: int,
        files: str | Path | None,
    ):
        self.model, self.corpus, self.chunk = model, corpus, chunk
        self.max_tokens, self.max_document = max_tokens, max_document
        self.counts = {f.name: LayerCounts(f.experts) for f in layer_facts(model)}
        self.identity = identity_of_model(model, files)
        self.done = Progress()
        self.path: Path | None = None
        self.save_every = self.saved_at = 0.0
        self.counting = True
        self.interrupts = Interrupts()

    @property
    def settings(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one that began."""
        return {
            "chunk": self.chunk,
            "max_tokens": self.max_tokens,
            "max_document": self.max_document,
            "data": [str(path) for path in self.corpus.paths],
        }

    def keep(self, path: Path, resume: bool, save_every: float) -> None:
        """Save at `path` from now on, and go on from what is there if `resume`."""
        self.path, self.save_every = path, save_every
        if resume:
            found = load_state(path, self.identity, self.settings, self.counts)
            self.done = found or self.done

    def observers(self) -> dict[str, Observer]:
        return {name: self._observer(name, counts) for name, counts in self.counts.items()}

    def _observer(self, name: str, counts: LayerCounts) -> Observer:
        def observe(
            module: Any, layer: Layer, x: mx.array, ids: mx.array, scores: mx.array | None
        ) -> None:
            if not self.counting:
                return
            if x.shape[:-1] != ids.shape[:-1]:
                raise UnsupportedLayer(
                    f"{name}: input {x.shape} and experts {ids.shape} differ in their tokens"
                )
            k = self.done.top_k[name] = ids.shape[-1]
            seen = [ids.reshape(-1, k), mx.linalg.norm(x.astype(mx.float32), axis=-1).reshape(-1)]
            if scores is not None:
                seen.append(scores.astype(mx.float32).reshape(-1, k))
            mx.eval(x, seen)
            counts.stage(*map(np.asarray, seen))

        return observe

    def run(self, bar: Any) -> None:
        """Prefill what is not done yet; on any way out, save what is."""
        bar.update(sum(self.done.chunk_tokens))
        self.saved_at = monotonic()
        with self.interrupts:
            try:
                self._documents(bar)
            except BaseException:
                with self.interrupts.held():
                    self._save()
                raise
        if not self.done.chunk_tokens:
            raise BadData(f"there are no tokens in {', '.join(self.settings['data'])}")

    def _documents(self, bar: Any) -> None:
        digest, number, begun = hashlib.sha256(), 0, self.done.documents
        for document in parts(self.corpus, self.max_document, self.max_tokens):
            number += 1
            digest.update(np.array([-1, *document.tokens], "<i8").tobytes())
            if number < begun:
                continue
            if number == begun and digest.hexdigest() != self.done.digest:
                break
            before = self.done.chunks if number == begun else 0
            self._prefill(document, before, number, digest.hexdigest(), bar)
        if number < begun or (number == begun > 0 and digest.hexdigest() != self.done.digest):
            raise InvalidArgument(
                f"{self.path} was begun with other data: the first {begun} documents of "
                f"{', '.join(self.settings['data'])} have changed; {AGAIN}"
            )

    def _prefill(self, document: Document, before: int, number: int, digest: str, bar: Any) -> None:
        """One document from an empty cache, which the `before` chunks done already only fill."""
        starts = range(0, len(document.tokens), self.chunk)
        if before >= len(starts):
            return
        cache = make_prompt_cache(self.model)
        for index, start in enumerate(starts):
            tokens = document.tokens[start : start + self.chunk]
            self.counting = index >= before
            self.model(mx.array(tokens)[None], cache=cache)
            mx.eval([c.state for c in cache])
            if not self.counting:
                continue
            with self.interrupts.held():
                self._commit(document, number, index + 1, digest, len(tokens))
                if monotonic() - self.saved_at >= self.save_every:
                    self._save()
            self._show(bar, len(tokens), len(document.tokens) - start - len(tokens))
        mx.clear_cache()

    def _commit(
        self, document: Document, number: int, chunks: int, digest: str, tokens: int
    ) -> None:
        for counts in self.counts.values():
            counts.commit()
        done = self.done
        done.documents, done.chunks, done.digest = number, chunks, digest
        done.chunk_tokens.append(tokens)
        source = str(document.source)
        done.source_tokens[source] = done.source_tokens.get(source, 0) + tokens

    def _show(self, bar: Any, tokens: int, left: int) -> None:
        """`tokens` more are done, and `left` of the document, which was read whole, to come."""
        if self.corpus.bytes_read:
            read = sum(self.done.chunk_tokens) + left
            bar.total = read * max(self.corpus.size, 1) // self.corpus.bytes_read
        if self.max_tokens is not None:
            bar.total = min(bar.total or self.max_tokens, self.max_tokens)
        bar.update(tokens)

    def _save(self) -> None:
        for counts in self.counts.values():
            counts.discard()
        if self.path is not None and self.done.chunk_tokens:
            save_state(self.path, self.identity, self.settings, self.done, self.counts)
        self.saved_at = monotonic()

    def result(self) -> Calibration:
        paths, tokens = self.corpus.paths, self.done.source_tokens
        return Calibration(
            self.identity,
            self.chunk,
            self.done.chunk_tokens,
            layer_facts(self.model, self.done.top_k),
            [_statistics(counts) for counts in self.counts.values()],
            [
                Source(str(path), tokens.get(str(i), 0), digest)
                for i, (path, digest) in enumerate(zip(paths, self.corpus.digests, strict=True))
            ],
        )


def _statistics(counts: LayerCounts) -> LayerStatistics:
    together = counts.coactivation()  # counts what was put off
    scores = counts.scores.quantiles(QUANTILES)
    return LayerStatistics(
        loads=np.array(counts.loads, np.uint32),
        coactivation=together,
        score_quantiles=scores if counts.scored else np.full_like(scores, np.nan),
        norm_quantiles=counts.norms.quantiles(QUANTILES),
    )
