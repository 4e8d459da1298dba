"""Which backend runs a problem on a device, and why not the others.

The order is the backend= argument, else use_backend(), else ATTNLIB_BACKEND, else core's short list for the kind of
device and then the alphabet. The first candidate without a refusal is chosen; it then runs or raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import registry, settings
from .backend import Backend, Family, Plan, Refusal, RefusalCode, Target, capability_refusals
from .errors import ArgumentError, ArgumentTypeError, UnsupportedError
from .lru import LRU
from .problem import AttentionProblem
from .targets import parse_target, target_of

__all__ = ["Candidate", "Decision", "parse_target", "select", "target_of", "use_backend"]

log = logging.getLogger("attnlib")

DEFAULT_ORDER: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cpu",),
    "cuda": ("cuda", "triton", "cupy"),
    "rocm": ("triton", "cupy"),
}
ONLY_BY_NAME = frozenset({"reference"})


@dataclass(frozen=True)
class Candidate:
    """A backend, or one family of it, with every reason why it does not take the problem."""

    name: str
    backend: Backend | None
    family: Family | None
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, eq=False)
class Decision:
    """What dispatch found. `chosen` is a full name such as "cpu:avx512", or None; str() tells the whole story."""

    problem: AttentionProblem
    target: Target
    candidates: tuple[Candidate, ...]
    chosen: str | None
    rule: str
    details: Mapping[str, Any] | None = None

    @property
    def refusals(self) -> dict[str, tuple[Refusal, ...]]:
        return {candidate.name: candidate.refusals for candidate in self.candidates if candidate.refusals}

    @property
    def candidate(self) -> Candidate:
        """The chosen one. Raises UnsupportedError with every backend's reasons if there is none."""
        for candidate in self.candidates:
            if candidate.name == self.chosen:
                return candidate
        raise UnsupportedError(f"no backend takes this problem\n{self}", self.refusals)

    def __str__(self) -> str:
        lines = [f"{summary(self.problem)}", f"on {self.target}: {self.chosen or 'nothing chosen'} ({self.rule})"]
        width = max((len(candidate.name) for candidate in self.candidates), default=0)
        for candidate in self.candidates:
            if candidate.name == self.chosen:
                lines.append(f"  {candidate.name:{width}}  chosen")
            elif not candidate.refusals:
                only = candidate.name in ONLY_BY_NAME and self.rule.startswith("default")
                lines.append(f"  {candidate.name:{width}}  {'only when named' if only else 'would take it'}")
            for index, refusal in enumerate(candidate.refusals):
                lines.append(f"  {candidate.name if index == 0 else '':{width}}  {refusal}")
        for key, value in (self.details or {}).items():
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, Mapping) else value
            lines.append(f"  {key}: {text}")
        return "\n".join(lines)


def summary(problem: AttentionProblem) -> str:
    """One line that restates the call."""
    p = problem
    kind = "packed" if p.packed else "dense"
    heads = f"{p.num_heads_q}" if p.group == 1 else f"{p.num_heads_q}/{p.num_heads_kv}"
    dims = f"{p.head_dim}" if p.head_dim == p.head_dim_v else f"{p.head_dim}/{p.head_dim_v}"
    asked = ", ".join(sorted(feature.value for feature in p.features)) or "no features"
    return (
        f"attention {str(p.dtype).removeprefix('torch.')}, {kind}, batch {p.batch}, seqlen_q {p.seqlen_q}, "
        f"seqlen_k {p.seqlen_k}, heads {heads}, head_dim {dims}; {asked}"
    )


# --- which names, in which order ------------------------------------------------------------------------------------
#
# What is in force for a call travels with it as one string, through compiled graphs and to autograd's threads:
# "" or "cpu,triton", "$" before names that come from ATTNLIB_BACKEND, "@token" behind for a config of use_config().


class _Stack(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.token = ""


stack = _Stack()
_configs: dict[str, Mapping[str, Any]] = {}


@contextlib.contextmanager
def use_backend(*names: str) -> Iterator[None]:
    """Run every attention call of this thread inside the with block on the named backends, in order of preference.

    What is in force belongs to the thread: tasks of one asyncio loop share it. (torch.compile traces a thread-local,
    and would break its graph at a ContextVar.)

    Args:
        names: backend names ("cpu"), or families ("cpu:avx2"), best first.

    Raises:
        ArgumentError: a name is not known.

    Example:
        >>> with attnlib.use_backend("reference"):
        ...     out = attnlib.attention(q, k, v)  # doctest: +SKIP
    """
    if not torch.compiler.is_compiling():  # inside a compiled graph the operator checks the names
        names = parse_names(names, "use_backend")
    stack.names.append(",".join(names))
    try:
        yield
    finally:
        stack.names.pop()


@contextlib.contextmanager
def use_config(config: Mapping[str, Any] | None) -> Iterator[None]:
    """Hand config to Backend.plan for every call of this thread, its backward included; for tests and tuning.

    One that does not fit is refused by the backend, never adjusted.
    """
    before, token = stack.token, ""
    if config is not None:
        token = "@" + ";".join(f"{key}={value!r}" for key, value in sorted(config.items()))
        _configs[token] = dict(config)
    stack.token = token
    try:
        yield
    finally:
        stack.token = before


def requested(backend: str | None) -> str:
    """What is in force for a call: the argument, else use_backend(), else ATTNLIB_BACKEND, else ""."""
    if backend is not None:
        if not isinstance(backend, str):
            raise ArgumentTypeError(f"backend: needs a name or a comma list of names, got {backend!r}")
        if not backend:
            raise ArgumentError(f"backend: needs at least one name, got ''; known: {', '.join(registry.names())}")
        names = backend
    elif stack.names:
        names = stack.names[-1]
    elif torch.compiler.is_compiling():
        names = ""  # the operator reads the environment
    else:
        names = from_environment()
    return names + stack.token


def pinned(spec: str, name: str) -> str:
    """spec with the one backend that ran the forward, for its backward."""
    _, at, token = spec.partition("@")
    return name + at + token


def resolved(spec: str) -> str:
    """spec with what ATTNLIB_BACKEND holds now, for a call from a graph that was compiled without a name."""
    return from_environment() + spec if not spec or spec.startswith("@") else spec


def from_environment() -> str:
    """ATTNLIB_BACKEND in the form that travels with a call."""
    names = settings.current().backend
    return "$" + names if names else ""


def parse_names(names: tuple[str, ...] | str, argument: str) -> tuple[str, ...]:
    """Checked, trimmed, lower-case names. Raises ArgumentError that lists the known ones."""
    parts = names.split(",") if isinstance(names, str) else names
    known = registry.names()
    result = []
    for part in parts:
        if not isinstance(part, str):
            raise ArgumentTypeError(f"{argument}: needs backend names, got {part!r}")
        name = part.strip().lower()
        if name not in known:
            raise ArgumentError(f"{argument}: no backend is called {part.strip()!r}; known: {', '.join(known)}")
        result.append(name)
    if not result:
        raise ArgumentError(f"{argument}: needs at least one name; known: {', '.join(known)}")
    return tuple(result)


def _split_spec(spec: str) -> tuple[str, Mapping[str, Any] | None]:
    """The names of a spec and its config."""
    names, at, rest = resolved(spec).partition("@")
    return names, (_configs[at + rest] if at else None)


def _order(target: Target, names: str) -> tuple[tuple[str, ...] | None, str]:
    """The names to try (None: the default order) and the rule that says so."""
    if not names:
        return None, f"default order for {target.kind}"
    if names.startswith("$"):
        return parse_names(names[1:], "ATTNLIB_BACKEND"), "ATTNLIB_BACKEND"
    return parse_names(names, "backend"), "asked for by name"


# --- selection ------------------------------------------------------------------------------------------------------

_decisions: LRU[Decision] = LRU(256)
_plans: LRU[Plan] = LRU(256)
_planning = threading.RLock()
ready: LRU[Any] = LRU(512)  # run.prepare's
caches: list[Any] = [_decisions, _plans, ready]  # what clear_caches() clears


def clear_caches() -> None:
    """Forget decisions and plans; for tests."""
    for cache in caches:
        cache.clear()


def cache_sizes() -> dict[str, int]:
    """How many decisions and plans are kept; for tests."""
    return {"decisions": len(_decisions), "plans": len(_plans)}


def select(problem: AttentionProblem, target: Target, spec: str = "") -> Decision:
    """The decision for a problem on a target. It may be a cached one, made for other sizes and scalars."""
    key = _key(problem, target, spec)
    decision = _decisions.get(key)
    if decision is None:
        decision = _select(problem, target, _split_spec(spec)[0])
        if all(reason.what != "backend" for candidate in decision.candidates for reason in candidate.refusals):
            _decisions.put(key, decision)  # an answer that failed may come next time
        if "dispatch" in settings.current().log:
            log.info("%s", decision)
    return decision


def settled(problem: AttentionProblem, target: Target, spec: str) -> bool:
    """Whether the decision for a problem is kept: not if some backend failed to answer."""
    return _decisions.get(_key(problem, target, spec)) is not None


def _key(problem: AttentionProblem, target: Target, spec: str) -> Hashable:
    """All that a decision depends on."""
    return problem.signature, target, _split_spec(spec)[0], registry.generation


def _select(problem: AttentionProblem, target: Target, names: str) -> Decision:
    order, rule = _order(target, names)
    candidates = sorted(_candidates(problem, target), key=lambda c: _rank(c.name, order, target))
    chosen = None
    for candidate in candidates:
        if not candidate.refusals and _may_choose(candidate.name, order):
            chosen = candidate.name
            break
    return Decision(problem, target, tuple(candidates), chosen, rule)


def _candidates(problem: AttentionProblem, target: Target) -> Iterator[Candidate]:
    for entry in registry.entries():
        if entry.backend is None:
            reason = entry.refusal or Refusal(RefusalCode.LOAD, "import", "a backend", "nothing")
            yield Candidate(entry.name, None, None, (reason,))
            continue
        for family in entry.families:
            name = f"{entry.name}:{family.name}" if family.name else entry.name
            yield Candidate(name, entry.backend, family, _refusals(problem, entry.backend, family, target))


def _refusals(problem: AttentionProblem, backend: Backend, family: Family, target: Target) -> tuple[Refusal, ...]:
    found = list(capability_refusals(problem, family, target))
    if target.kind not in family.capabilities.device_kinds:
        return tuple(found)  # nothing more to learn from a backend for another kind of device
    for question in (
        lambda: backend.check(problem, family.name, target),
        lambda: backend.available(family.name, target),
    ):
        try:
            found.extend(reason for reason in question() if reason not in found)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            found.append(Refusal(RefusalCode.LOAD, "backend", "an answer to whether it takes the problem", what))
    return tuple(found)


def _matches(name: str, wanted: str) -> bool:
    return name == wanted or name.split(":")[0] == wanted


def _rank(name: str, order: tuple[str, ...] | None, target: Target) -> tuple[int, str]:
    for index, wanted in enumerate(order if order is not None else DEFAULT_ORDER.get(target.kind, ())):
        if _matches(name, wanted):
            return index, ""
    return sys.maxsize, name.split(":")[0]


def _may_choose(name: str, order: tuple[str, ...] | None) -> bool:
    if order is None:
        return name.split(":")[0] not in ONLY_BY_NAME
    return any(_matches(name, wanted) for wanted in order)


def wants_reference(spec: str) -> bool:
    """Whether the reference, which is differentiable by itself, is among the names in force."""
    return any(name.strip() == "reference" for name in spec.lower().lstrip("$").split(","))


def device_refusals(family: Family, target: Target) -> tuple[Refusal, ...]:
    """Why a family cannot run on target at all, whatever the problem."""
    probe = AttentionProblem(next(iter(family.capabilities.dtypes)), 1, 1, 1, 1, 1, 1, 1, 1.0)
    return capability_refusals(probe, family, target)


def choose(problem: AttentionProblem, target: Target, spec: str = "") -> Candidate:
    """The candidate that runs. Raises UnsupportedError with every backend's reasons if there is none."""
    decision = select(problem, target, spec)
    if decision.chosen is None:
        decision = dataclasses.replace(decision, problem=problem)
    return decision.candidate


def plan_for(problem: AttentionProblem, target: Target, spec: str = "") -> tuple[str, Plan]:
    """The chosen backend's full name and its plan. Raises UnsupportedError with every backend's reasons."""
    candidate = choose(problem, target, spec)
    backend, family = candidate.backend, candidate.family
    assert backend is not None and family is not None
    config = _split_spec(spec)[1]
    token = spec.partition("@")[2]
    size_class = backend.size_class(problem, family.name, target)
    key = (problem.signature, problem.aligned, target, candidate.name, size_class, token, registry.generation)
    plan = _plans.get(key)
    if plan is None:
        with _planning:
            plan = _plans.get(key)
            if plan is None:
                plan = backend.plan(problem, family.name, target, config)
                _plans.put(key, plan)
    return candidate.name, plan
