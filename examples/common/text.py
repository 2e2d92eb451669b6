"""Windows of a text."""

import torch


def windows(text, length, count, generator):
    """(inputs, targets), each (count, length) int64 on the text's device: random windows, the targets one place later.

    generator: of the CPU, so that a seed gives the same windows on every device.
    """
    if len(text) <= length:
        raise ValueError(f"length must be less than the {len(text)} elements of the text, got {length}")
    starts = torch.randint(len(text) - length, (count, 1), generator=generator).to(text.device, non_blocking=True)
    taken = text[starts + torch.arange(length + 1, device=text.device)].long()
    return taken[:, :-1], taken[:, 1:]
