"""Devices as dispatch sees them: kind, architecture and resources, present or not."""

from __future__ import annotations

import platform
from typing import Any

import torch

from .backend import Resources, Target
from .errors import ArgumentError

_targets: dict[torch.device, Target] = {}


def target_of(device: torch.device) -> Target:
    """The target of a device that is present."""
    target = _targets.get(device)
    if target is None:
        target = _targets[device] = _find_target(device)
    return target


def _find_target(device: torch.device) -> Target:
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            return Target("rocm", properties.gcnArchName.split(":")[0], index, resources=_resources(properties))
        return Target("cuda", f"sm_{properties.major}{properties.minor}", index, resources=_resources(properties))
    if device.type == "cpu":
        return Target("cpu", platform.machine())
    return Target(device.type, device.type, device.index)


def _resources(properties: Any) -> Resources:
    return Resources(
        multiprocessors=properties.multi_processor_count,
        shared_memory_per_block=getattr(
            properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
        ),
        l2_bytes=properties.L2_cache_size,
        warp_size=properties.warp_size,
    )


def parse_target(device: str | torch.device | Target) -> Target:
    """A target from a device, or from the name of an architecture that need not be here: "sm_90", "gfx942", "cpu"."""
    if isinstance(device, Target):
        return device
    if isinstance(device, str):
        name = device.strip().lower()
        if name.startswith("sm_") and name[3:].rstrip("af").isdigit():
            return Target("cuda", name.rstrip("af"), present=False)
        if name.startswith("gfx") and len(name) > 3:
            return Target("rocm", name.split(":")[0], present=False)
    try:
        return target_of(torch.device(device))
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ArgumentError(
            f"device: needs a torch device, or an architecture such as sm_90 or gfx942, got {device!r} ({error})"
        ) from None
