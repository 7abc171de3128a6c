import torch

from spmd_rl.engine.update import disturbed


def test_disturbed_weights_have_other_norms_and_biases_and_share_the_rest():
    tensors = {"matrix": torch.ones(2, 3), "norm": torch.ones(3, dtype=torch.bfloat16), "table": torch.arange(3)}
    made = disturbed(tensors)
    assert made["matrix"] is tensors["matrix"] and made["table"] is tensors["table"]
    assert made["norm"].tolist() == [2.0] * 3 and made["norm"].dtype == torch.bfloat16
    assert tensors["norm"].tolist() == [1.0] * 3


def test_a_model_without_vectors_is_disturbed_in_its_smallest_matrix():
    tensors = {"large": torch.ones(4, 3), "small": torch.ones(2, 3)}
    made = disturbed(tensors)
    assert made["large"] is tensors["large"] and made["small"].tolist() == [[2.0] * 3] * 2
