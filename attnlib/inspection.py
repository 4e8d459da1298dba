"""What would run and why: explain, the backends there are, and what each declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import dispatch, registry
from .api import attention, attention_kvcache, attention_varlen
from .arguments import check, check_devices, check_memory
from .backend import Target
from .calls import autocast, blocks_of, check_cache, length_hint, scalars_of, seed_tensor
from .dispatch import Decision
from .errors import ArgumentTypeError
from .lengths import check_values
from .operands import Operands
from .ops import outside_transforms
from .options import check_flag
from .problem import AttentionProblem, Feature


def explain(
    q: Any, k: Any = None, v: Any = None, *, device: Any = None, backend: str | None = None, **arguments: Any
) -> Decision:
    """Which backend would run a call, and every reason of the others; for hardware that is not present, too.

    Args:
        q, k, v: as in attention, attention_varlen or attention_kvcache; or an AttentionProblem as the only one.
        device: None for the device of q, a torch device, or an architecture: "sm_90", "gfx942", "cpu".
        backend: as in attention.
        arguments: any keyword of the three functions; cu_seqlens_q or kv_lens may be among them.

    Returns:
        A Decision: str() prints it, .chosen names the backend or is None, .refusals holds the reasons.

    Raises:
        ArgumentError, ArgumentTypeError: as the call itself would, lengths that do not fit included; also for
            keywords that no function takes together.

    Example:
        >>> print(attnlib.explain(q, k, v, causal=True, device="sm_90"))   # doctest: +SKIP
    """
    if isinstance(q, AttentionProblem):
        if k is not None or v is not None or arguments:
            raise ArgumentTypeError(
                "explain: needs either an AttentionProblem alone, or q, k, v and keywords, got both"
            )
        problem, home = q, torch.device("cpu")
    else:
        problem, operands = _problem_of(q, k, v, arguments)
        if outside_transforms(operands[Operands._fields.index("q_lens") :]):  # plain lengths, with values to look at
            check_values(operands, problem)
        home = operands.q.device
    target = dispatch.parse_target(device if device is not None else home)
    decision = dispatch.select(problem, target, dispatch.requested(backend))
    return _with_details(dataclasses.replace(decision, problem=problem))


def _with_details(decision: Decision) -> Decision:
    """The decision with what the chosen plan says of itself, where that can be had without the device."""
    if decision.chosen is None:
        return decision
    candidate = decision.candidate
    assert candidate.backend is not None and candidate.family is not None
    try:
        details = candidate.backend.describe(decision.problem, candidate.family.name, decision.target)
    except Exception as error:  # a port's fault must not hide the decision
        details = {"describe": f"{type(error).__name__}: {error}"}
    return dataclasses.replace(decision, details=details)


def problem_of(q: Any, k: Any, v: Any, **arguments: Any) -> AttentionProblem:
    """The AttentionProblem of a call with these arguments, any keyword of the three attention functions."""
    return _problem_of(q, k, v, arguments)[0]


_FUNCTIONS: Mapping[str, Mapping[str, Any]] = {
    function.__name__: dict.fromkeys(extra) | (function.__kwdefaults__ or {})
    for function, extra in (
        (attention, ()),
        (attention_varlen, ("cu_seqlens_q", "cu_seqlens_k")),
        (attention_kvcache, ("kv_lens",)),
    )
}


def _functions_for(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the functions that take these keywords. Raises ArgumentTypeError if there is none."""
    defaults = {name: value for keywords in _FUNCTIONS.values() for name, value in keywords.items()}
    for name in arguments:
        if name not in defaults:
            raise ArgumentTypeError(f"explain: no attention function has an argument {name!r}")
    given = {
        name
        for name, value in arguments.items()
        if value is not None and not (isinstance(value, (bool, float, str)) and value in (defaults[name], False))
    }
    packed = not given.isdisjoint({"cu_seqlens_q", "cu_seqlens_k"})
    found = [
        function
        for function, keywords in _FUNCTIONS.items()
        if given <= keywords.keys() and (packed or function != "attention_varlen")
    ]
    if not found:
        raise ArgumentTypeError(f"explain: no attention function takes {', '.join(sorted(given))} together")
    return found


def _problem_of(q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> tuple[AttentionProblem, Operands]:
    cache = _functions_for(arguments) == ["attention_kvcache"]
    if not isinstance(q, torch.Tensor):
        from .adapters import arrays

        q = arrays.to_torch(q)[0]
        k, v = arrays.as_torch("k", k), arrays.as_torch("v", v)
        arguments = {name: arrays.as_torch(name, value) for name, value in arguments.items()}
    get = arguments.get
    check_flag("return_lse", get("return_lse", False))
    block_mask, dropout_p, seed = get("block_mask"), get("dropout_p", 0.0), get("dropout_seed")
    operands = Operands(
        q, k, v, get("bias"), get("mask"), get("alibi_slopes"), get("sinks"), blocks_of(block_mask), get("q_lens"),
        get("kv_lens"), get("cu_seqlens_q"), get("cu_seqlens_k"), get("page_table"),
        None if seed is None else seed_tensor(q, dropout_p, seed), get("k_new"), get("v_new"), get("new_lens"),
    )  # fmt: skip
    check_devices(operands)
    check_memory(zip(Operands._fields, operands))
    if cache:
        check_cache(operands)
    operands = autocast(operands, cache)
    scalars = scalars_of(
        operands, get("causal", False), get("causal_alignment", "bottom_right"), get("window"), get("scale"),
        get("softcap"), dropout_p, get("deterministic"), block_mask,
        length_hint("max_seqlen_q", get("max_seqlen_q")), length_hint("max_seqlen_k", get("max_seqlen_k")),
    )  # fmt: skip
    return check(operands, scalars), operands


@dataclass(frozen=True)
class BackendInfo:
    """A backend as attnlib.backends() lists it. `unusable` says why it can't run on the device asked about."""

    name: str
    origin: str
    families: tuple[str, ...]
    unusable: tuple[Any, ...]
    import_seconds: float


def backends(device: Any = "cpu") -> tuple[BackendInfo, ...]:
    """Every backend known, with the reasons why one cannot run on device (see explain); never makes a CUDA context.

    Example:
        >>> [info.name for info in attnlib.backends()][:1]
        ['reference']
    """
    target = dispatch.parse_target(device)
    return tuple(_info(entry, target) for entry in registry.entries())


def _info(entry: registry.Entry, target: Target) -> BackendInfo:
    if entry.backend is None:
        return BackendInfo(entry.name, entry.origin, (), (entry.refusal,), entry.seconds)
    reasons: list[Any] = []
    for family in entry.families:
        mine = list(dispatch.device_refusals(family, target))
        if not mine:
            mine += entry.backend.available(family.name, target)
        if not mine:
            reasons = []
            break
        reasons += [reason for reason in mine if reason not in reasons]
    names = tuple(family.name for family in entry.families if family.name)
    return BackendInfo(entry.name, entry.origin, names, tuple(reasons), entry.seconds)


def support_matrix() -> list[dict[str, Any]]:
    """One row for each kernel family, made from the declared capabilities: devices, dtypes, head_dim, features.

    Example:
        >>> attnlib.support_matrix()[0]["backend"]
        'reference'
    """
    rows = []
    for entry in registry.entries():
        for family in entry.families:
            caps = family.capabilities
            rows.append(
                {
                    "backend": f"{entry.name}:{family.name}" if family.name else entry.name,
                    "devices": sorted(caps.device_kinds),
                    "archs": list(caps.archs),
                    "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in caps.dtypes),
                    "max_head_dim": caps.max_head_dim,
                    "features": {feature.value: feature in caps.features for feature in Feature},
                    "masked_nan_safe": (caps.masked_nan_safe_forward, caps.masked_nan_safe_backward),
                    "note": family.note,
                }
            )
    return rows
