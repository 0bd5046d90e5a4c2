"""Stored checkpoints of both hosts give their logits on a GPU, train there, and generate."""

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.compare import assert_close
from tests.golden import make_fairseq, make_timm

TEXT = sorted(make_fairseq.registered())
IMAGES = sorted(make_timm.GOLDEN)


def text_model(arch: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The model of a checkpoint on the GPU, its tokens and its logits."""
    golden = torch.load(make_fairseq.FOLDER / f"{arch}.pt", weights_only=True)["golden"]
    return make_fairseq.load(arch).cuda(), golden["tokens"].cuda(), golden["logits"]


def image_model(file: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The model of a checkpoint on the GPU, its images and its logits."""
    name, arguments, images, logits = make_timm.stored(file)
    model = timm.create_model(name, **arguments, checkpoint_path=str(make_timm.weights(file)))
    return model.eval().cuda(), images.cuda(), logits


def assert_trains(model: nn.Module, logits_of) -> None:
    """Five steps in mixed precision, as both hosts' trainers take them, lower the loss; without dropout."""
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.amp.GradScaler("cuda")
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = logits_of(model)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, -2), target_of(logits))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses


def target_of(logits: Tensor) -> Tensor:
    """A fixed class for every row."""
    return torch.arange(logits.shape[:-1].numel(), device=logits.device) % logits.shape[-1]


def logits_of(output) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("arch", TEXT)
@torch.no_grad()
def test_text_models_keep_their_logits(arch):
    model, tokens, logits = text_model(arch)
    assert_close("logits", model(tokens)[0].cpu(), logits, 2e-5)
    assert_close("in bfloat16", model.bfloat16()(tokens)[0].float().cpu(), logits, 0.05)


@pytest.mark.parametrize("arch", TEXT)
def test_text_models_train(arch):
    model, tokens, _ = text_model(arch)
    assert_trains(model, lambda model: logits_of(model(tokens)))


@pytest.mark.parametrize("arch", [arch for arch in TEXT if "_lm" in arch])
@torch.no_grad()
def test_language_models_decode(arch):
    """One token at a time, as fairseq-generate does, gives the logits of the whole sequence."""
    model, tokens, logits = text_model(arch)
    state: dict = {}
    decoded = [model(tokens[:, : i + 1], incremental_state=state)[0][:, -1] for i in range(tokens.shape[1])]
    assert_close("decoded", torch.stack(decoded, 1).cpu(), logits, 2e-5)


@pytest.mark.parametrize("file", IMAGES)
@torch.no_grad()
def test_image_models_keep_their_logits(file):
    model, images, logits = image_model(file)
    assert_close("logits", model(images).cpu(), logits, 2e-5)
    channels_last = model.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    assert_close("channels last", channels_last.cpu(), logits, 2e-5)


@pytest.mark.parametrize("file", IMAGES)
def test_image_models_train(file):
    model, images, _ = image_model(file)
    assert_trains(model, lambda model: logits_of(model(images)))
