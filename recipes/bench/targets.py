"""What is to be reached, and whether it was."""

from collections.abc import Callable
from typing import NamedTuple

from .cases import daft, flow, images, language_models
from .floors import floors
from .records import Record, Results
from .work import BACKWARD, DECODING, FORWARD, TRAINING


class Verdict(NamedTuple):
    """What was achieved; ``reached`` is None where it was not measured."""

    achieved: str
    reached: bool | None


class Target(NamedTuple):
    """One thing to be reached, and how it is read off the results."""

    case: str
    device: str
    work: str
    peer: str
    reach: str
    judge: Callable[[Results], Verdict]


NOT_MEASURED = Verdict("not measured", None)


def faster(case: str, size: int, run: str, form: str, peer: str, least: float) -> Callable[[Results], Verdict]:
    """``form`` at least ``least`` times as fast as ``peer``."""

    def judge(results: Results) -> Verdict:
        ratio = results.ratio(case, size, run, form, peer)
        return NOT_MEASURED if ratio is None else Verdict(f"{ratio:.3g}x", ratio >= least)

    return judge


def share(case: str, size: int, form: str, peer: str, most: float) -> Callable[[Results], Verdict]:
    """A training step of ``form`` in at most ``most`` of the time of ``peer``."""

    def judge(results: Results) -> Verdict:
        ratio = results.ratio(case, size, TRAINING, form, peer)
        return NOT_MEASURED if ratio is None else Verdict(f"{1 / ratio:.3f}", 1 / ratio <= most)

    return judge


def break_even(longest: int) -> Callable[[Results], Verdict]:
    """Causal Flow-Attention as fast as fused softmax attention, from ``longest`` tokens on or before."""

    def judge(results: Results) -> Verdict:
        found = None
        sizes = results.sizes("causal_flow", BACKWARD, flow.OURS)
        # A run that stops short, or one with gaps, does not show where it stays faster.
        if not {longest, 2 * longest} <= set(sizes):
            return NOT_MEASURED
        for size in reversed(sizes):
            ratio = results.ratio("causal_flow", size, BACKWARD, flow.OURS, flow.SOFTMAX)
            if ratio is None or ratio < 1.0:
                break
            found = size
        return Verdict(
            "none measured" if found is None else f"{found:,} tokens", found is not None and found <= longest
        )

    return judge


def half_the_memory(results: Results) -> Verdict:
    """Flow-Attention that is not causal beside the authors' form."""
    ours, theirs = (results.find("full_flow", 4096, BACKWARD, form) for form in (flow.OURS, flow.AUTHORS))
    if ours is None or theirs is None:
        return NOT_MEASURED
    part = ours.extra_bytes / theirs.extra_bytes
    return Verdict(f"{part:.2f}", part <= 0.5)


def causal_memory(results: Results) -> Verdict:
    """Causal Flow-Attention: multiples of q, k and v, and growth from half the longest length to it."""
    sizes = results.sizes("causal_flow", BACKWARD, flow.OURS)
    found: dict[int, Record] = {size: results.find("causal_flow", size, BACKWARD, flow.OURS) for size in sizes}
    if len(found) < 2 or sizes[-1] != 2 * sizes[-2]:
        return NOT_MEASURED
    most, where = max((one.extra_bytes / one.input_bytes, one.size) for one in found.values())
    growth = found[sizes[-1]].extra_bytes / found[sizes[-2]].extra_bytes
    return Verdict(
        f"{most:.2f}x at {where:,} tokens, {growth:.2f} times for twice as many", most <= 3.0 and growth <= 2.1
    )


def constant_decoding(form: str) -> Callable[[Results], Verdict]:
    """A decoding step of ``form`` far from the start beside one near it."""

    def judge(results: Results) -> Verdict:
        near, far = (
            results.find("decoding", place, DECODING, form) for place in (language_models.NEAR, language_models.FAR)
        )
        if near is None or far is None:
            return NOT_MEASURED
        times = far.median / near.median
        return Verdict(f"{times:.2f}x", times <= 1.1)

    return judge


def growing(results: Results) -> Verdict:
    """DeiT with Flow-Attention beside softmax attention at both sizes."""
    found = [results.ratio("deit", side, TRAINING, images.FLOW, images.SOFTMAX) for side in (512, 1024)]
    if None in found:
        return NOT_MEASURED
    small, large = found
    return Verdict(f"{small:.2f}x, {large:.2f}x", 1.0 < small < large)


def half_the_floor(run: str) -> Callable[[Results], Verdict]:
    """Causal Flow-Attention on a GPU: the least fraction of its floor from 8,192 tokens on."""

    def judge(results: Results) -> Verdict:
        found = [one.fraction for one in floors(results, "causal_flow_cuda") if one.run == run and one.size >= 8192]
        return NOT_MEASURED if not found else Verdict(f"{min(found):.2f}", min(found) >= 0.5)

    return judge


_CAUSAL, _SOFTMAX, _AUTHORS = "causal Flow-Attention, ", "causal softmax, fused", "authors' form"
_FAR = f"position {language_models.FAR:,}"
TARGETS = (
    Target(
        "causal_flow", "cpu", _CAUSAL + "n = 2,048, forward", _AUTHORS, "100x",
        faster("causal_flow", 2048, FORWARD, flow.OURS, flow.AUTHORS, 100.0),
    ),
    Target(
        "causal_flow", "cpu", _CAUSAL + "n = 16,384, forward", _SOFTMAX, "17x",
        faster("causal_flow", 16384, FORWARD, flow.OURS, flow.SOFTMAX, 17.0),
    ),
    Target(
        "causal_flow", "cpu", _CAUSAL + "n = 16,384, forward + backward", _SOFTMAX, "20x",
        faster("causal_flow", 16384, BACKWARD, flow.OURS, flow.SOFTMAX, 20.0),
    ),
    Target(
        "causal_flow", "cpu", _CAUSAL + "forward + backward, break-even", _SOFTMAX, "at or below 512 tokens",
        break_even(512),
    ),
    Target(
        "full_flow", "cpu", "Flow-Attention not causal, n = 4,096, forward + backward", _AUTHORS, "3x",
        faster("full_flow", 4096, BACKWARD, flow.OURS, flow.AUTHORS, 3.0),
    ),
    Target("full_flow", "cpu", "the same, peak memory", _AUTHORS, "half", half_the_memory),
    Target(
        "causal_flow", "cpu", _CAUSAL + "forward + backward, peak memory", "size of q, k and v", "3x, linear in n",
        causal_memory,
    ),
    Target(
        "decoding", "cpu", f"decoding step of flowformer_lm, {_FAR}", f"at {language_models.NEAR}", "within 1.1x",
        constant_decoding("flowformer_lm"),
    ),
    Target(
        "decoding", "cpu", f"decoding step of flash_lm, {_FAR}", f"at {language_models.NEAR}", "within 1.1x",
        constant_decoding("flash_lm"),
    ),
    Target(
        "decoding", "cpu", f"decoding step of flowformer_lm, {_FAR}", "transformer_lm, cache", "5x",
        faster("decoding", language_models.FAR, DECODING, "flowformer_lm", "transformer_lm", 5.0),
    ),
    Target(
        "decoding", "cpu", f"decoding step of flash_lm, {_FAR}", "transformer_lm, cache", "5x",
        faster("decoding", language_models.FAR, DECODING, "flash_lm", "transformer_lm", 5.0),
    ),
    Target(
        "flash_lm_256", "cpu", "training step of flash_lm, n = 8,192, width 256", "transformer_pp_lm, fused",
        "at most 0.24", share("flash_lm_256", 8192, "flash_lm", "transformer_pp_lm", 0.24),
    ),
    Target(
        "flash_lm_512", "cpu", "training step of flash_lm, n = 8,192, width 512", "transformer_pp_lm, fused",
        "at most 0.24", share("flash_lm_512", 8192, "flash_lm", "transformer_pp_lm", 0.24),
    ),
    Target(
        "hier", "cpu", "flowformer_hier_s, training, 224²", "the authors' model", "1.5x",
        faster("hier", 224, TRAINING, images.HIERARCHICAL, images.AUTHORS, 1.5),
    ),
    Target(
        "deit", "cpu", "flowformer_deit_s, training, 512² and 1024²", "deit_s, fused softmax",
        "faster, growing with the area", growing,
    ),
    Target(
        "daft_conv", "cpu", "daft_conv causal, window 64, n = 4,096, forward", "direct convolution", "3x",
        faster("daft_conv", 4096, FORWARD, daft.OURS, daft.DIRECT, 3.0),
    ),
    Target(
        "daft_conv", "cpu", "the same, forward + backward", "direct convolution", "3x",
        faster("daft_conv", 4096, BACKWARD, daft.OURS, daft.DIRECT, 3.0),
    ),
    Target(
        "causal_flow_cuda", "cuda", _CAUSAL + "forward, from 8,192 tokens on", "memory or matrix floor", "half",
        half_the_floor(FORWARD),
    ),
    Target(
        "causal_flow_cuda", "cuda", _CAUSAL + "forward + backward, from 8,192 tokens on", "memory or matrix floor",
        "half", half_the_floor(BACKWARD),
    ),
    Target(
        "flash_lm_cuda", "cuda", "training step of flash_lm, n = 8,192", "transformer_pp_lm, fused", "at most 0.6",
        share("flash_lm_cuda", 8192, "flash_lm", "transformer_pp_lm", 0.6),
    ),
    Target(
        "flash_lm_cuda", "cuda", "training step of flash_lm, n = 131,072", "transformer_pp_lm, fused",
        "at most 0.083", share("flash_lm_cuda", 131072, "flash_lm", "transformer_pp_lm", 0.083),
    ),
)  # fmt: skip
