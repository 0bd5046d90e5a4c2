"""Training resumes from a state dict: all state that a forward pass depends on is in it, or in torch's generator."""

import torch

from tests.common.contract.mechanisms import CASES, cases, tensors

#: Enough passes for every pass counter to wrap around, also when it starts from the middle.
PASSES = 7


@cases(case for case in CASES if not case.rotary)
def test_passes_in_training_go_on_from_the_state_dict(case):
    module, other = case.build().train(), case.build(std=0.1).train()
    inputs = tensors(module, 9, grad=False)
    for _ in range(PASSES):
        module(**inputs)
    other.load_state_dict(module.state_dict())
    outputs = []
    for model in (module, other):
        torch.default_generator.manual_seed(3)
        outputs.append([model(**inputs) for _ in range(PASSES)])
    assert all(torch.equal(*both) for both in zip(*outputs))
