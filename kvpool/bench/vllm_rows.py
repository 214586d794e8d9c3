"""What `kvpool bench vllm` reports, and how it follows from the times that were measured."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from kvpool.bench.measure import rounded
from kvpool.bench.vllm_messages import Decoded

NONE, LOCAL, SHM, TCP, MOONCAKE = "none", "local", "kvpool-shm", "kvpool-tcp", "mooncake"
PATHS = (NONE, LOCAL, SHM, TCP, MOONCAKE)
"""Where the prefix comes from: computed, the engine's own cache, the pool over two transports, Mooncake over TCP."""

TARGETS_OF_MOONCAKE = {SHM: 0.55, TCP: 0.7}
TARGET_ABOVE_LOCAL_MS = {SHM: 25.0}
TARGET_SAVING = 1.02
TARGET_DECODE = 1.05


class VllmRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="vllm"):
    """Time to first token on one path.

    Attributes:
        path: One of `PATHS`.
        ttft_p50_s: Median of the rounds.
        ttft_min_s: The fastest round.
        tokens_loaded: Tokens of the prompt that were not computed.
        prompt_tokens: Tokens of the prompt.
        of_mooncake: Its time as a part of Mooncake's, median of the rounds.
        above_local_ms: What it takes more than a local hit, median of the rounds.
        rounds: Rounds, each with a prompt of its own.
    """

    path: str
    ttft_p50_s: float
    ttft_min_s: float
    tokens_loaded: int
    prompt_tokens: int
    of_mooncake: float | None
    above_local_ms: float | None
    rounds: int


class VllmSavingRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="vllm_saving"):
    """The first computation of a prompt on an engine that saves it.

    Attributes:
        path: Where it is saved.
        ttft_p50_s: Median of the rounds.
        of_none: Its time as a part of the time without saving, median of the rounds.
        landed_p50_s: From the first token until the pool has every block, and the engine its own back.
        rounds: Rounds.
    """

    path: str
    ttft_p50_s: float
    of_none: float
    landed_p50_s: float
    rounds: int


class VllmDecodeRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="vllm_decode"):
    """Time between tokens of a running request, with and without other requests that are loading.

    Attributes:
        path: From where they load.
        alone_p50_ms: Median while it runs alone.
        loading_p50_ms: Median while another one loads, the step that computes the other's last tokens left out.
        ratio: The second as a multiple of the first.
        alone_steps: Steps that were timed alone.
        loading_steps: Steps that were timed during a load.
    """

    path: str
    alone_p50_ms: float
    loading_p50_ms: float
    ratio: float
    alone_steps: int
    loading_steps: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt on one engine: computed first, then again with its prefix cached or loaded.

    Attributes:
        computed_s: Time to first token of the first computation.
        again_s: Time to first token of the second.
        cached_tokens: Tokens of the prompt that the second did not compute.
        landed_s: From the first answer until all was saved; 0 without a pool.
    """

    computed_s: float
    again_s: float
    cached_tokens: int
    landed_s: float = 0.0


Samples = Mapping[str, Sequence[Sample]]
"""The samples of each engine, by path, `LOCAL` for the one without a pool; element i of each is round i."""


def ttft_rows(samples: Samples, prompt_tokens: int) -> list[VllmRow]:
    """A row for each path that was measured."""
    times = {path: [sample.again_s for sample in samples[path]] for path in PATHS if path in samples}
    loaded = {path: min(sample.cached_tokens for sample in samples[path]) for path in times}
    if LOCAL in samples:
        times = {NONE: [sample.computed_s for sample in samples[LOCAL]], **times}
        loaded[NONE] = 0
    return [
        VllmRow(
            path=path,
            ttft_p50_s=rounded(statistics.median(path_s)),
            ttft_min_s=rounded(min(path_s)),
            tokens_loaded=loaded[path],
            prompt_tokens=prompt_tokens,
            of_mooncake=_ratio(path_s, times.get(MOONCAKE)) if path != MOONCAKE else None,
            above_local_ms=_above_ms(path_s, times.get(LOCAL)) if path not in {NONE, LOCAL} else None,
            rounds=len(path_s),
        )
        for path, path_s in times.items()
    ]


def saving_rows(samples: Samples) -> list[VllmSavingRow]:
    """A row for each path that saves, against the engine without a pool; none when that was not measured."""
    if LOCAL not in samples:
        return []
    none_s = [sample.computed_s for sample in samples[LOCAL]]
    rows = []
    for path in (SHM, TCP, MOONCAKE):
        if path in samples:
            computed_s = [sample.computed_s for sample in samples[path]]
            rows.append(
                VllmSavingRow(
                    path=path,
                    ttft_p50_s=rounded(statistics.median(computed_s)),
                    of_none=_ratio(computed_s, none_s) or 0.0,
                    landed_p50_s=rounded(statistics.median(sample.landed_s for sample in samples[path])),
                    rounds=len(computed_s),
                )
            )
    return rows


def decode_row(path: str, runs: Sequence[Decoded]) -> VllmDecodeRow:
    """The row of runs of one engine; every run must have steps of both kinds."""
    steps = [split_steps(run) for run in runs]
    alone_s = [step for alone, _ in steps for step in alone]
    loading_s = [step for _, loading in steps for step in loading]
    alone, loading = statistics.median(alone_s), statistics.median(loading_s)
    return VllmDecodeRow(
        path=path,
        alone_p50_ms=rounded(alone * 1e3),
        loading_p50_ms=rounded(loading * 1e3),
        ratio=rounded(loading / alone),
        alone_steps=len(alone_s),
        loading_steps=len(loading_s),
    )


def split_steps(run: Decoded) -> tuple[list[float], list[float]]:
    """Seconds of the running request's steps: alone, and while another one was loading.

    The step that brings the other's first token computes with it, and is neither.
    """
    alone: list[float] = []
    loading: list[float] = []
    for began_s, ended_s in pairwise(run.token_s):
        touching = [span for span in run.spans_s if span[0] < ended_s and began_s < span[1]]
        if not touching:
            alone.append(ended_s - began_s)
        elif all(ended_s < first_s for _, first_s in touching):
            loading.append(ended_s - began_s)
    return alone, loading


def _ratio(ours_s: Sequence[float], theirs_s: Sequence[float] | None) -> float | None:
    """Median of the rounds' ratios: neighbours in time are alike, rounds far apart are not."""
    if theirs_s is None:
        return None
    return rounded(statistics.median(ours / theirs for ours, theirs in zip(ours_s, theirs_s, strict=True)))


def _above_ms(ours_s: Sequence[float], theirs_s: Sequence[float] | None) -> float | None:
    if theirs_s is None:
        return None
    return rounded(1e3 * statistics.median(ours - theirs for ours, theirs in zip(ours_s, theirs_s, strict=True)))
