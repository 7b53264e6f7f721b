"""Whether activations of long prompts are rounded where they meet FP8 weights (`--activations`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.operations import Kernels
from models.preflight import AUTO
from tandem.errors import ConfigError

PLAIN = "plain"
"""What activations are that are never rounded."""


def with_activations(kernels: Kernels, activations: str, device: torch.device, *, is_made_so: bool) -> Kernels:
    """Returns the kernels that round them, or `kernels`; under `auto` by whether the checkpoint `is_made_so`.

    Raises ConfigError if the option wants what these kernels do not have.
    """
    if activations == PLAIN or (activations == AUTO and not is_made_so):
        return kernels
    operations = kernels.operations.rounding(device)
    if operations is None and activations != AUTO:
        raise ConfigError("--activations", f"{kernels.name} multiplies no {activations} on {device}: leave it out")
    return kernels if operations is None else replace(kernels, operations=operations)
