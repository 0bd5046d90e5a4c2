"""``python -m common.check my_idea.py``: does an attention of your own keep what both hosts rely on?

For each mechanism that a file or a module registers, or for a registered name, it prints a table: what holds, what does
not apply, and what fails, with the smallest input that shows it and what that would mean. It takes less than a minute.
The tests of the contract, ``pytest tests/common/contract --mechanism FILE`` in a checkout, also try every option.
"""

import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .attention import ATTENTIONS, InnerAttention, NoReference, build_attention, import_own
from .command_parser import CommandParser

#: H, d, the lengths that are tried, from the smallest on, and those between which memory grows.
HEADS, CHANNELS, LENGTHS, LONG = 2, 4, (1, 2, 3, 5, 8, 13, 21), (1024, 2048)
#: The largest relative differences: in float64, of steps of differences, and in bfloat16, which has 8 bits.
EXACT, DIFFERENCES, ROUGH = 1e-8, 1e-5, 5e-2


class DoesNotApply(Exception):
    """The reason why a mechanism need not keep a promise."""


class Subject(NamedTuple):
    """A mechanism as it is tested: its name, and whether it is causal."""

    name: str
    causal: bool

    def build(self, dtype: torch.dtype = torch.float64, longest: int = LENGTHS[-1]) -> InnerAttention:
        """Build it in evaluation mode, with parameters and buffers that are the same each time."""
        if "spatial_shape" in ATTENTIONS[self.name].needs:
            raise DoesNotApply("it is for images alone, which this command does not make")
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(1)
            shape = {"num_heads": HEADS, "head_dim": CHANNELS, "max_tokens": longest}
            return build_attention(self.name, self.causal, **shape).to(dtype).eval()

    def inputs(self, module: InnerAttention, n: int, batch: int = 2) -> dict[str, Any]:
        """Random tensors in float64 for n tokens; those of fewer tokens are their beginnings."""
        generator, widths = torch.Generator().manual_seed(2), module.projections(CHANNELS)
        longest = max(n, LENGTHS[-1])
        shapes = {name: (batch, HEADS, longest, widths[name]) for name in ("q", "k", "v") if name in widths}
        shapes |= module.inputs(x=(batch, longest, HEADS * CHANNELS), source_q=(batch, HEADS, longest, CHANNELS))
        made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        return {"q": None, "k": None, **tokens(made, slice(n))}


def tokens(inputs: dict[str, Any], which: Any) -> dict[str, Any]:
    """The tokens ``which`` of all inputs."""
    return {name: x if x is None else x[:, which] if name == "x" else x[:, :, which] for name, x in inputs.items()}


def differs(out: Tensor, expected: Tensor, tolerance: float = EXACT) -> bool:
    """Whether two results differ by more than a part of the larger one, or are no numbers."""
    out, expected = out.detach(), expected.detach()
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return not bool(((out.double() - expected.double()).abs() <= tolerance * scale).all())


def shapes(subject: Subject) -> str | None:
    module = subject.build()
    for n in LENGTHS:
        inputs = subject.inputs(module, n)
        out = module(**inputs)
        if out.shape != inputs["v"].shape or not bool(out.isfinite().all()):
            return f"n = {n}: {tuple(out.shape)} for v {tuple(inputs['v'].shape)}, or no numbers"


def neighbours(subject: Subject) -> str | None:
    module = subject.build()
    for n in LENGTHS:
        inputs = subject.inputs(module, n)
        alone = {name: x if x is None else x[:1] for name, x in inputs.items()}
        if differs(module(**inputs)[:1], module(**alone)):
            return f"n = {n}: the first of two rows is another one than alone"


def causality(subject: Subject) -> str | None:
    if not subject.causal:
        raise DoesNotApply("all tokens see each other")
    module = subject.build()
    for n in LENGTHS[1:]:
        inputs = subject.inputs(module, n)
        whole = module(**inputs)
        for t in range(1, n):
            if differs(module(**tokens(inputs, slice(t))), whole[:, :, :t]):
                return f"n = {n}: outputs of the first {t} change when {n - t} more follow"


def padding(subject: Subject) -> str | None:
    module = subject.build()
    for n in LENGTHS[1:]:
        inputs = subject.inputs(module, n)
        for side, real in (("right", slice(n - 1)), ("left", slice(1, n)), ("holes", slice(0, n, 2))):
            mask = torch.ones(2, n, dtype=torch.bool)
            mask[:, real] = False
            loud = {name: x if x is None else x.clone() for name, x in inputs.items()}
            for name, x in loud.items():
                if x is not None:
                    x.masked_fill_(mask[:, :, None] if name == "x" else mask[:, None, :, None], torch.nan)
            out = module(**loud, key_padding_mask=mask, query_padding_mask=mask)
            if differs(out[:, :, real], module(**tokens(inputs, real))):
                return f"n = {n}, padding {side}: real tokens have other outputs than without it"


def gradients(subject: Subject) -> str | None:
    module = subject.build()
    for n in LENGTHS[:5]:
        inputs = subject.inputs(module, n)
        leaves = {name: x.requires_grad_() for name, x in inputs.items() if x is not None}
        leaves |= {name: x for name, x in module.named_parameters() if x.requires_grad}
        out = module(**inputs)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
        found = torch.autograd.grad((out * weights).sum(), leaves.values(), allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), found):
            step = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(4), dtype=leaf.dtype)
            values = []
            with torch.no_grad():
                for sign in (1, -1):
                    leaf.add_(step, alpha=sign * 1e-6)
                    values.append((module(**inputs) * weights).sum())
                    leaf.add_(step, alpha=-sign * 1e-6)
            actual = torch.zeros_like(step) if gradient is None else gradient
            if differs((actual * step).sum(), (values[0] - values[1]) / 2e-6, DIFFERENCES):
                return f"n = {n}: the gradient of {name} is not the slope"


def half_precision(subject: Subject) -> str | None:
    module, exact = subject.build(torch.bfloat16), subject.build(torch.bfloat16).double()
    for n in LENGTHS:
        inputs = {name: x if x is None else x.bfloat16() for name, x in subject.inputs(module, n).items()}
        out, expected = module(**inputs), exact(**{name: x if x is None else x.double() for name, x in inputs.items()})
        if out.dtype != torch.bfloat16 or differs(out, expected, ROUGH):
            return (
                f"n = {n}: {out.dtype}, {float((out.double() - expected).abs().max()):.2g} from the result in float64"
            )


def steps(subject: Subject) -> str | None:
    if not subject.causal:
        raise DoesNotApply("it is not causal, so it does not decode")
    module = subject.build()
    for n in LENGTHS:
        inputs, state, parts = subject.inputs(module, n), None, []
        for t in range(n):
            out, state = module.extend(**tokens(inputs, slice(t, t + 1)), state=state)
            parts.append(out)
        if differs(torch.cat(parts, dim=2), module(**inputs)):
            return f"n = {n}: {n} steps of one token give another result than the whole"


def reference(subject: Subject) -> str | None:
    module = subject.build()
    for n in LENGTHS[:5]:
        inputs = subject.inputs(module, n)
        try:
            expected = module.reference(**inputs)
        except NoReference:
            raise DoesNotApply("it declares none") from None
        if differs(module(**inputs), expected):
            return f"n = {n}: another result than the literal formula"


class _Largest(TorchDispatchMode):
    """Notes the most numbers of a tensor that is computed inside."""

    numbers = 0

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return out


@torch.no_grad()
def memory(subject: Subject) -> str | None:
    sizes = []
    for n in LONG:
        module = subject.build(torch.float32, n)
        inputs = {name: x if x is None else x.float() for name, x in subject.inputs(module, n).items()}
        with _Largest() as largest:
            module(**inputs)
        sizes.append(largest.numbers)
    growth = f"from {LONG[0]} to {LONG[1]} tokens the largest tensor grows {sizes[1] / max(1, sizes[0]):.1f} times"
    if not ATTENTIONS[subject.name].linear_cost:
        raise DoesNotApply(f"it declares no linear cost; {growth}")
    return growth if sizes[1] > 3 * sizes[0] else None


#: Each promise: its test, and what a failure would mean for a user.
PROMISES: dict[str, tuple[Callable[[Subject], str | None], str]] = {
    "shapes": (shapes, "no model can be built with it"),
    "rows of a batch": (neighbours, "results depend on the batch size and on who shares a batch"),
    "causality": (causality, "a language model sees the words that it predicts: its perplexity is wrong"),
    "padding": (padding, "results depend on the longest text or recording of a batch"),
    "gradients": (gradients, "training follows another direction than the loss"),
    "half precision": (half_precision, "--fp16, --bf16 and autocast train something else"),
    "steps": (steps, "generated text is not what the model of the training would write"),
    "reference": (reference, "it computes something else than its formula"),
    "memory": (memory, "long inputs fill the memory, although it declares a linear cost"),
}


def check(name: str, causal: bool) -> Iterator[tuple[str, str, str]]:
    """The promise, the verdict and its reason for each promise to the mechanism ``name``."""
    for promise, (test, meaning) in PROMISES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of decoding without a state
                found = test(Subject(name, causal))
            yield (promise, "holds", "") if found is None else (promise, "FAILS", f"{found}. Then {meaning}.")
        except DoesNotApply as reason:
            yield promise, "does not apply", str(reason)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            yield promise, "FAILS", f"{problem}. Then {meaning}."


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables; exits with status 1 if a promise is broken, and with one line if there is no mechanism."""
    parser = CommandParser(prog="python -m common.check", description=__doc__.split("\n")[0])
    parser.add_argument("mechanism", help="a path that ends in .py, a module, or a name such as flow")
    given = parser.parse_args(arguments).mechanism
    names = [given]
    if given not in ATTENTIONS:
        with parser.one_line_errors():
            (module,) = import_own(given, "mechanism")
        names = [name for name, kind in ATTENTIONS.items() if kind.__module__ == module]
    if not names:
        raise SystemExit(f"{parser.prog}: mechanism is {given}, which registers none; allowed: one that registers some")
    broken = False
    for name in names:
        supported = ATTENTIONS[name].supports
        for causal in [
            x for x, words in ((True, {"causal"}), (False, {"bidirectional", "source"})) if words & supported
        ]:
            print(f"\n{name}, {'causal' if causal else 'bidirectional'}")
            for promise, verdict, reason in check(name, causal):
                line = f"  {promise:16} {verdict:15} {reason}".rstrip()
                print(textwrap.fill(line, 118, subsequent_indent=" " * 34), flush=True)
                broken |= verdict == "FAILS"
    if broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
