"""What a CUDA graph asks of an optimizer: a captured step reads no number from the host."""

import torch


def capturable(optimizer):
    """The optimizer, fused, itself: on a GPU its steps can be captured, also after it loaded a checkpoint of a CPU."""
    allow_capture(optimizer)
    optimizer.register_load_state_dict_post_hook(allow_capture)
    return optimizer


def allow_capture(optimizer):
    for group in optimizer.param_groups:
        group["capturable"] = group["params"][0].is_cuda


def set_rate(optimizer, rate):
    """Set the learning rate of all groups. On a GPU it is a tensor, written in place: a replay reads it, where a number
    would stay that of the capture."""
    for group in optimizer.param_groups:
        if not group["capturable"]:
            group["lr"] = rate
        elif torch.is_tensor(group["lr"]):
            group["lr"].fill_(rate)
        else:
            group["lr"] = torch.tensor(rate, device=group["params"][0].device)
