"""Streams through models and through the task: the literal training, token by token, with states that are detached."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.data import data_utils
from fairseq.distributed import ModuleProxyWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fairseq_plugin import StreamingLanguageModelingTask
from fairseq_plugin.modules.carried_state import CarriedState
from fairseq_plugin.tasks.streaming_language_modeling import check_streams
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.encoder_decoders import build_model as build_encoder_decoder
from tests.fairseq_plugin.helpers.language_models import awake, build_model
from tests.fairseq_plugin.helpers.text import PAD, tokens

#: Of each kind of state one; FLASH's chunks of 16 tokens are no divisors of the blocks.
ARCHITECTURES = {
    "flowformer_lm": (),
    "linear_lm": ("--linear-forget", "head", "--linear-short-conv", "3"),
    "flash_lm": (),
    "gla_lm": (),
    "gated_delta_lm": (),
    "daft_conv_lm": (),
    "local_lm": ("--local-window", "9"),
}
BLOCK, BLOCKS = 21, 4


def _model(arch: str, *arguments: str, dropout: str = "0", seed: int = 1, words: int = 60) -> nn.Module:
    options = ["--dropout", dropout, "--attention-dropout", dropout, "--activation-dropout", dropout]
    return awake(build_model(arch, *ARCHITECTURES.get(arch, ()), *options, *arguments, seed=seed, words=words))


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    """The sum over real tokens, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")


def _in_blocks(model: nn.Module, sequence: Tensor, sizes: int | list[int]) -> Tensor:
    """Logits of a text by blocks, each after the one before."""
    before, logits = None, []
    for block in sequence.split(sizes, dim=1):
        carried = CarriedState(before)
        logits.append(model(block, incremental_state=carried)[0])
        before = carried.after
    return torch.cat(logits, dim=1)


def _token_by_token(model: nn.Module, sequence: Tensor, block: int) -> Tensor:
    """The literal reference: fairseq's steps of one token through the text; the state is detached after each block."""
    state: dict[str, dict[str, Tensor | None]] = {}
    logits = []
    for end in range(1, sequence.shape[1] + 1):
        logits.append(model(sequence[:, :end], incremental_state=state)[0])
        if end % block == 0:
            for entries in state.values():
                entries.update({name: x if x is None else x.detach() for name, x in entries.items()})
    return torch.cat(logits, dim=1)


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, x in model.named_parameters() if x.requires_grad]
    found = torch.autograd.grad(loss, [model.get_parameter(name) for name in names], allow_unused=True)
    return {name: x for name, x in zip(names, found) if x is not None}


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "softmax_lm", "favor_lm"])
@torch.no_grad()
def test_blocks_are_the_whole_text(arch: str) -> None:
    """Of any length; beyond the --tokens-per-sample of 256. Neither states nor tables of positions grow."""
    model, sequence = _model(arch).eval(), tokens(2, 320)
    whole, tables = model(sequence)[0], getattr(model.decoder.embed_positions, "weights", torch.empty(0)).numel()
    for sizes in ([1, 100, 7, 212], 64):
        logits, before, entries = [], None, []
        for block in sequence.split(sizes, dim=1):
            carried = CarriedState(before)
            logits.append(model(block, incremental_state=carried)[0])
            before = carried.after
            entries.append(sum(x.numel() for state in before.values() for x in state.values()))
        assert_close(f"blocks of {sizes}", torch.cat(logits, dim=1), whole, 2e-5)
    assert len(set(entries[2:])) == 1 or arch == "softmax_lm"
    assert getattr(model.decoder.embed_positions, "weights", torch.empty(0)).numel() == tables


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_training_is_that_of_one_sequence_with_detached_states(arch: str) -> None:
    """Losses and gradients of all blocks, two rows, the second of which ends earlier."""
    model, sequence = _model(arch).train(), tokens(2, BLOCK * BLOCKS + 1)
    source, target = sequence[:, :-1].clone(), sequence[:, 1:].clone()
    source[1, -8:] = target[1, -8:] = PAD
    expected = _loss(_token_by_token(model, source, BLOCK), target)
    found = _loss(_in_blocks(model, source, BLOCK), target)
    assert_close("loss", found, expected, 1e-5)
    literal, ours = _gradients(model, expected), _gradients(model, found)
    assert literal.keys() == ours.keys()
    for name, gradient in literal.items():
        assert_close(name, ours[name], gradient, 2e-4)
    whole = _gradients(model, _loss(model(source)[0], target))
    assert any((whole[name] - x).norm() > 1e-2 * x.norm() for name, x in ours.items())  # it is truncated


@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_lm", "daft_conv_lm"])
def test_attention_dropout_is_that_of_the_forward_pass(arch: str) -> None:
    """With the same draws a first block is fairseq's; in evaluation nothing is dropped."""
    model, block = _model(arch, "--decoder-layers", "1", dropout="0.4").train(), tokens(2, 20)
    results = []
    for state in (None, CarriedState()):
        torch.manual_seed(3)
        loss = model(block, incremental_state=state)[0].square().sum()
        results.append((loss, _gradients(model, loss)))
    assert_close("loss", results[1][0], results[0][0], 1e-5)
    for name, gradient in results[0][1].items():
        assert_close(name, results[1][1][name], gradient, 1e-4, floor=1.0)  # the bias of DAFT's keys cancels
    with torch.no_grad():
        model.eval()
        assert_close("evaluation", _in_blocks(model, block, 7), model(block)[0], 2e-5)


@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_lm", "local_lm"])
def test_recomputed_activations_go_on_from_the_same_state(arch: str) -> None:
    """--checkpoint-activations runs a layer twice; with dropout too, and the state that is kept has no graph."""
    source, found = tokens(2, 3 * BLOCK), []
    for more in ((), ("--checkpoint-activations",)):
        model, before = _model(arch, *more, dropout="0.2").train(), None
        torch.manual_seed(5)
        for block in source.split(BLOCK, dim=1):
            carried = CarriedState(before)
            loss = model(block, incremental_state=carried)[0].square().mean()
            model.zero_grad()
            loss.backward()
            before = carried.after
            assert all(x.grad_fn is None for entries in before.values() for x in entries.values() if x is not None)
        found.append((loss, [x.grad for x in model.parameters() if x.grad is not None]))
    assert_close("loss", found[1][0], found[0][0], 1e-5)
    for one, other in zip(found[1][1], found[0][1], strict=True):
        assert_close("gradient", one, other, 1e-4)


class _Backward:
    """What a task asks of an optimizer."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def _task(data: str, split: str = "train", batch_size: int = 12, **options) -> tuple:
    """The task, the batches of an epoch, and the criterion."""
    args = {"data": data, "tokens_per_sample": 40, "output_dictionary_size": -1, "dataset_impl": None, "seed": 1}
    args |= {"sample_break_mode": "none", "shorten_method": "none", "shorten_data_split_list": "", **options}
    args |= dict.fromkeys(("use_plasma_view", "plasma_path", "pad_to_fixed_length", "pad_to_fixed_bsz"))
    args |= {"add_bos_token": False, "batch_size": None, "batch_size_valid": None, **options}
    task = StreamingLanguageModelingTask.setup_task(Namespace(**args))
    task.load_dataset(split)
    iterator = task.get_batch_iterator(task.dataset(split), max_sentences=batch_size)
    return task, list(iterator.next_epoch_itr()), CrossEntropyCriterion(task, sentence_avg=False)


def _rows_of_text(data: str, task, rows: int, block: int) -> list[tuple[Tensor, Tensor]]:
    """The literal batches: the text as one array, its rows cut by hand; sources and targets (rows, block)."""
    lines = data_utils.load_indexed_dataset(str(Path(data) / "train"), task.dictionary, None)
    text = np.concatenate([[task.dictionary.eos()], *[line.numpy() for line in lines]])
    count = -(-(len(text) - 1) // block)
    lengths = [count // rows + (row < count % rows) for row in range(rows)]
    batches = []
    for step in range(max(lengths)):
        pairs = []
        for row in range(rows):
            if step < lengths[row]:
                begin = (sum(lengths[:row]) + step) * block
                pairs.append(torch.from_numpy(text[begin : begin + block + 1].astype(np.int64)))
        width = max(map(len, pairs)) - 1
        source = torch.stack([F.pad(pair[:-1], (0, width + 1 - len(pair)), value=PAD) for pair in pairs])
        target = torch.stack([F.pad(pair[1:], (0, width + 1 - len(pair)), value=PAD) for pair in pairs])
        batches.append((source, target))
    return batches


def _literal_training(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Losses of gradient descent, an update for each batch, one token after another."""
    losses, state, read = [], {}, None
    for source, target in batches:
        rows, logits = len(source), []
        state = {k: {n: x if x is None else x[:rows].detach() for n, x in e.items()} for k, e in state.items()}
        read = source if read is None else torch.cat([read[:rows], source], dim=1)
        for end in range(read.shape[1] - source.shape[1] + 1, read.shape[1] + 1):
            logits.append(model(read[:, :end], incremental_state=state)[0])
        loss = _loss(torch.cat(logits, dim=1), target)
        _descend(model, loss)
        losses.append(float(loss.detach()))
    return losses


def _descend(model: nn.Module, loss: Tensor | None = None) -> None:
    if loss is not None:
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-4 * parameter.grad
                parameter.grad = None


def _training(model: nn.Module, task, batches: list[dict], criterion, disturbed: bool = False) -> list[float]:
    """The same through the task; ``disturbed`` by repeated batches, ignored ones and validation in between."""
    losses = []
    for update, batch in enumerate(batches):
        if disturbed and update % 2 == 1:
            task.train_step(batch, model, criterion, _Backward(), update)  # overflowed: the same is fed again
            model.zero_grad()
        loss, _, _ = task.train_step(batch, model, criterion, _Backward(), update)
        if disturbed:
            task.train_step(batches[0], model, criterion, _Backward(), update, ignore_grad=True)
            task.valid_step(batches[update // 2], model, criterion)
        _descend(model)
        losses.append(float(loss.detach()))
    return losses


def test_the_task_trains_as_the_literal_loop(data_bin: str) -> None:
    """A whole epoch of rows of unequal lengths; repeated, ignored and validated batches change nothing.

    Seconds, because the literal loop takes a step for each token.
    """
    task, batches, criterion = _task(data_bin)
    words = len(task.dictionary) - 4
    literal, plain, disturbed = (_model("flowformer_lm", words=words) for _ in range(3))
    expected = _literal_training(literal, _rows_of_text(data_bin, task, 12, 40))
    assert len(expected) == len(batches) > 5
    assert sum(batch["ntokens"] for batch in batches) == int(task.dataset("train").sizes.sum())
    for model, is_disturbed in ((plain, False), (disturbed, True)):
        model.train()
        assert _training(model, task, batches, criterion, is_disturbed) == pytest.approx(expected, rel=1e-4)
        for one, other in zip(model.parameters(), literal.parameters()):
            assert_close("weights", one, other, 1e-3)


def test_batches_of_an_update_are_repeated_from_its_first(data_bin: str) -> None:
    """--update-freq 3: after an overflow all three come again, and go on from the states that they went on from."""
    task, batches, criterion = _task(data_bin, batch_size=6)
    model = _model("flowformer_lm", words=len(task.dictionary) - 4).train()

    def update(number: int, own: list[dict]) -> list[float]:
        return [float(task.train_step(x, model, criterion, _Backward(), number)[0].detach()) for x in own]

    found = [update(0, batches[:1]), update(1, batches[1:4]), update(1, batches[1:4]), update(2, batches[4:6])]
    assert found[1] == found[2]
    expected = _literal_losses(model, [(x["net_input"]["src_tokens"], x["target"]) for x in batches[:6]])
    assert [*found[0], *found[2], *found[3]] == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def _literal_losses(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Losses of blocks without any update, by the whole forward pass."""
    logits = model(torch.cat([source for source, _ in batches], dim=1))[0]
    width = batches[0][0].shape[1]
    return [float(_loss(x, target)) for x, (_, target) in zip(logits.split(width, dim=1), batches)]


def test_half_precision(data_bin: str) -> None:
    """--fp16 halves the model; what is carried stays in float32, and losses are those of float32 but for rounding."""
    task, batches, criterion = _task(data_bin)
    model = _model("flowformer_lm", words=len(task.dictionary) - 4).half().train()
    found = [float(task.train_step(x, model, criterion, _Backward(), i)[0].detach()) for i, x in enumerate(batches[:4])]
    expected = _literal_losses(model.float(), [(x["net_input"]["src_tokens"], x["target"]) for x in batches[:4]])
    assert found == pytest.approx(expected, rel=1e-2)


def test_through_distributed_data_parallel(data_bin: str, tmp_path: Path) -> None:
    """--ddp-backend c10d, which fairseq has on GPUs alone: torch's wrapper hands the state on as it is."""
    task, batches, criterion = _task(data_bin)
    words = len(task.dictionary) - 4
    plain, wrapped = _model("flowformer_lm", words=words).train(), _model("flowformer_lm", words=words).train()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        parallel = ModuleProxyWrapper(DistributedDataParallel(wrapped))
        for update, batch in enumerate(batches[:4]):
            loss = task.train_step(batch, parallel, criterion, _Backward(), update)[0]
        expected = [_loss(x, y) for x, y in _last_block(plain, batches[:4])]
    finally:
        torch.distributed.destroy_process_group()
    assert_close("loss", loss.detach(), expected[-1].detach(), 1e-5)


def _last_block(model: nn.Module, batches: list[dict]) -> list[tuple[Tensor, Tensor]]:
    logits = _in_blocks(model, torch.cat([x["net_input"]["src_tokens"] for x in batches], dim=1), 40)
    return list(zip(logits.split(40, dim=1), (x["target"] for x in batches)))


@pytest.mark.parametrize(
    "arch, arguments, match",
    [
        ("softmax_lm", (), "'softmax' attention, whose state grows"),
        ("flash_quad_lm", ("--flash-relative-bias", "rotary"), "GatedAttentionUnit' attention, whose state grows"),
        ("combiner_lm", (), "whose state grows"),
        ("rfa_lm", (), "'rfa' attention, which draws anew"),
        ("favor_lm", ("--favor-redraw", "5"), "'favor' attention, which draws anew"),
        ("linear_lm", ("--decoder-layerdrop", "0.1"), "--decoder-layerdrop is 0.1; allowed .* 0"),
        ("linear_lm", ("--decoder-learned-pos",), "positions or distances of .* --decoder-learned-pos"),
        ("daft_full_lm", (), "positions or distances"),
        ("transformer_lm", (), "TransformerLanguageModel; allowed .* language models of this plugin"),
    ],
)
def test_models_that_read_no_streams_are_refused(arch: str, arguments: tuple[str, ...], match: str) -> None:
    """In training; in evaluation those alone that end or cannot go on."""
    model = build_model(arch, *arguments)
    with pytest.raises(ValueError, match=match):
        check_streams(model, training=True)
    if "grows" in match or "draws" in match or "layerdrop" in match:
        check_streams(model, training=False)
    else:
        with pytest.raises(ValueError, match=match):
            check_streams(model, training=False)


def test_what_a_stream_cannot_have_is_refused(data_bin: str) -> None:
    """More rows than blocks, and a window: its context is everything. Options are in test_every_task.py."""
    with pytest.raises(ValueError, match="10000 streams .* allowed: from 1 to"):
        _task(data_bin, batch_size=10_000)
    task, _, _ = _task(data_bin)
    with pytest.raises(ValueError, match="--context-window is 8; allowed"):
        task.eval_lm_dataloader(task.dataset("train"), context_window=8)
    with pytest.raises(ValueError, match="FlowformerTransformer|language models"):
        check_streams(build_encoder_decoder("flowformer"), training=False)
