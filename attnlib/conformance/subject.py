"""The backend under test, as checks see it: calls through the public functions, judged by core's numerics.

Every call made here also tests the rule that a decision holds: what `explain` refuses must raise UnsupportedError,
what it accepts must run. A check ends by returning (passed), by `Refused`, or by any other exception (failed).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

import attnlib

from .. import dispatch, registry, settings
from ..backend import Backend, Capabilities, Family, Plan, Refusal, RefusalCode, Target
from ..errors import ArgumentError, UnsupportedError
from ..numerics import Expected, Record, Result, expect, judge
from ..problem import AttentionProblem
from .inputs import Inputs


class Refused(Exception):
    """The backend does not take the problem, said so beforehand, and raised at the call."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__("; ".join(map(str, refusals)))
        self.refusals = tuple(refusals)


class CheckFailed(AssertionError):
    """Something differs from the contract. `records` hold every figure that was compared."""

    def __init__(self, message: str, records: Sequence[Record] = ()) -> None:
        super().__init__(message)
        self.records = tuple(records)


def fail(message: str) -> NoReturn:
    raise CheckFailed(message)


def require(condition: Any, message: str | Callable[[], str]) -> None:
    """Fail unless condition holds; a tensor must hold in every element."""
    held = bool(condition.all()) if isinstance(condition, torch.Tensor) else bool(condition)
    if not held:
        raise CheckFailed(message if isinstance(message, str) else message())


def same_bits(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Fail unless both tensors hold the same numbers to the bit (every NaN counts as the same)."""
    require(got.shape == want.shape, f"{what}: needs shape {tuple(want.shape)}, got {tuple(got.shape)}")
    require(got.dtype == want.dtype, f"{what}: needs dtype {want.dtype}, got {got.dtype}")
    if got.is_floating_point():
        width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        got, want = (x.detach().contiguous().masked_fill(torch.isnan(x), 0).view(width) for x in (got, want))
    differ = int((got != want).sum())
    require(differ == 0, f"{what}: {differ} of {got.numel()} elements differ in their bits")


class Configured:
    """A backend whose plans get a config, under a name of its own; a mutant when the config names a fault."""

    def __init__(self, inner: Backend, name: str, config: Mapping[str, Any]) -> None:
        self.inner, self.name, self.config = inner, name, dict(config)
        self.api_version = inner.api_version

    @property
    def families(self) -> Sequence[Family]:
        return self.inner.families

    def available(self, family: str, target: Target) -> tuple[Refusal, ...]:
        return self.inner.available(family, target)

    def check(self, problem: AttentionProblem, family: str, target: Target) -> tuple[Refusal, ...]:
        return self.inner.check(problem, family, target)

    def size_class(self, problem: AttentionProblem, family: str, target: Target) -> Any:
        return self.inner.size_class(problem, family, target)

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> Plan:
        return self.inner.plan(problem, family, target, {**self.config, **(config or {})})

    def __getattr__(self, name: str) -> Any:  # what else the protocol has or gets
        return getattr(self.inner, name)


@dataclass
class Oracles:
    """Expected results by case, so that many mutants share them; the least recently used go first."""

    size: int = 48
    items: OrderedDict[Any, Expected] = field(default_factory=OrderedDict)

    def get(self, key: Any, compute: Callable[[], Expected]) -> Expected:
        if key is None:
            return compute()
        if key not in self.items:
            self.items[key] = compute()
            while len(self.items) > self.size:
                self.items.popitem(last=False)
        self.items.move_to_end(key)
        return self.items[key]


@dataclass
class Subject:
    """A backend, or one family of it, on one device. `name` is what backend= gets."""

    name: str
    device: torch.device
    backend: Backend
    family: Family
    oracles: Oracles = field(default_factory=Oracles)
    records: list[Record] = field(default_factory=list)

    @property
    def capabilities(self) -> Capabilities:
        return self.family.capabilities

    @property
    def dtype(self) -> torch.dtype:
        """The most exact dtype below float64 that the backend declares; checks that need one dtype take it."""
        order = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        return next(dtype for dtype in order if dtype in self.capabilities.dtypes)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes below float64 that the backend declares, narrowest first."""
        return [d for d in (torch.float16, torch.bfloat16, torch.float32) if d in self.capabilities.dtypes]

    @property
    def target(self) -> Target:
        return dispatch.target_of(self.device)

    # --- calls --------------------------------------------------------------------------------------------------------

    def refusals(self, problem: AttentionProblem) -> tuple[Refusal, ...]:
        """Why the backend does not take a problem here, from explain; empty if it does."""
        decision = attnlib.explain(problem, device=self.device, backend=self.name)
        if decision.chosen is not None:
            return ()
        mine = [c for c in decision.candidates if c.name == self.name or c.name.split(":")[0] == self.name]
        found = tuple(refusal for candidate in mine for refusal in candidate.refusals)
        return found or (Refusal(RefusalCode.OTHER, "backend", "a reason", "none"),)

    def call(self, function: str, *args: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of a public function. Refused where decision and call both refuse; fails where they differ."""
        positional = {
            "attention": (),
            "attention_varlen": ("cu_seqlens_q", "cu_seqlens_k"),
            "attention_kvcache": ("kv_lens",),
        }
        named = dict(zip(positional[function], args[3:], strict=False))
        described = {name: value for name, value in {**named, **keywords}.items() if name != "dropout_seed"}
        problem = attnlib.inspection.problem_of(*args[:3], **described)
        refusals = self.refusals(problem)
        try:
            out, lse = getattr(attnlib, function)(*args, **keywords, return_lse=True, backend=self.name)
        except UnsupportedError as error:
            if not refusals:
                raise CheckFailed(f"explain accepts the problem, the call raises UnsupportedError: {error}") from error
            if not any(error.refusals.values()):
                raise CheckFailed(f"UnsupportedError without refusals: {error}") from error
            raise Refused(refusals) from None
        if refusals:
            raise CheckFailed(f"explain refuses the problem ({'; '.join(map(str, refusals))}), the call runs")
        return out, lse

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> Any:
        return self.call("attention", q, k, v, **keywords)

    def run(self, inputs: Inputs) -> Result:
        """The call of `inputs`, forward and, with grads, backward."""
        out, lse = self.call(inputs.function, *inputs.positional, **inputs.arguments)
        if not inputs.grads:
            return Result(out, lse)
        results, grads = [], []
        if inputs.dout is not None:
            results, grads = [out], [inputs.dout]
        if inputs.dlse is not None:  # what arrives for a row without keys is ignored, NaN included
            results.append(lse)
            grads.append(torch.where(lse.detach() == -torch.inf, torch.nan, inputs.dlse))
        found = torch.autograd.grad(results, inputs.leaves(), grads)
        return Result(out.detach(), lse.detach(), **{"d" + n: g for n, g in zip(inputs.grads, found, strict=True)})

    def check(
        self,
        inputs: Inputs,
        *,
        key: Any = None,
        cancels: bool = False,
        plain: bool = False,
        result: Result | None = None,
    ) -> Result:
        """Run `inputs` and compare everything with the oracle by the rules of the contract; key: cache the oracle."""
        if result is None:
            result = self.run(inputs)
            for name, tensor in (("out", result.out), ("lse", result.lse)):
                assert tensor is not None
                require(tensor.is_contiguous(), f"{name}: needs to be contiguous, got strides {tensor.stride()}")
        problem = inputs.problem()
        tensors = inputs.tensors(problem)
        if inputs.grads and inputs.dout is None:
            tensors.dout = torch.zeros_like(result.out) if result.out is not None else None
        expected = self.oracles.get(key, lambda: expect(problem, tensors, bias_shape=inputs.bias_shape))
        verdict = judge(problem, tensors, result, cancels=cancels, plain=plain, expected=expected)
        self.records.extend(verdict.records)
        if not verdict.passed:
            raise CheckFailed("\n".join(map(str, verdict.failures)), verdict.records)
        return result

    def needs(self, **flags: bool) -> None:
        """Refuse, with the capability's name, unless the backend declares each flag as given."""
        for flag, wanted in flags.items():
            if getattr(self.capabilities, flag) != wanted:
                raise Refused([Refusal(RefusalCode.OTHER, flag, str(wanted), str(not wanted))])

    # --- tensors ------------------------------------------------------------------------------------------------------

    def randn(self, *shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1000003 + sum(shape))
        return torch.randn(shape, generator=generator).to(dtype or self.dtype).to(self.device)

    def ints(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def configured(self, suffix: str, config: Mapping[str, Any]) -> contextlib.AbstractContextManager[Subject]:
        """The same backend with a plan config, registered for the length of a with block."""
        return _configured(self, suffix, config)


@contextlib.contextmanager
def _configured(subject: Subject, suffix: str, config: Mapping[str, Any]) -> Iterator[Subject]:
    base, _, family = subject.name.partition(":")
    wrapped = Configured(subject.backend, f"{base}_{_name_part(suffix)}", config)
    registry.register_backend(wrapped)
    try:
        name = f"{wrapped.name}:{family}" if family else wrapped.name
        yield dataclasses.replace(subject, name=name, backend=wrapped, records=[])
    finally:
        registry.unregister_backend(wrapped.name)


def _widest(families: Sequence[Family]) -> Family:
    """The first family that declares the most dtypes, with those of all: one for a single dtype may stand before it."""
    family = max(families, key=lambda f: len(f.capabilities.dtypes))
    dtypes = frozenset().union(*(f.capabilities.dtypes for f in families))
    return dataclasses.replace(family, capabilities=dataclasses.replace(family.capabilities, dtypes=dtypes))


def default_device(families: Sequence[Family]) -> torch.device:
    """A device that is present and that the backend declares; else the CPU, where everything is then refused."""
    kinds = {kind for family in families for kind in family.capabilities.device_kinds}
    here = "rocm" if torch.version.hip else "cuda"
    return (
        torch.device("cuda", torch.cuda.current_device())
        if here in kinds and torch.cuda.is_available()
        else torch.device("cpu")
    )


@contextlib.contextmanager
def opened(
    backend: str | Backend, device: torch.device | str | None = None, config: Mapping[str, Any] | None = None
) -> Iterator[Subject]:
    """The subject for a registered name, for "tiled", or for a backend object, registered for the time being.

    Outputs are filled with NaN before each launch (ATTNLIB_DEBUG=poison) while the block runs.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(backend, str):
            base, _, wanted = backend.strip().lower().partition(":")
            if base == "tiled" and base not in registry.names():
                from .tiled import Tiled

                stack.enter_context(_registered(Tiled()))
            found = _entry(base, backend)
        else:
            wanted, found = "", backend
            if all(entry.backend is not backend for entry in registry.entries()):
                stack.enter_context(_registered(backend))
        families = [family for family in found.families if wanted in ("", family.name)]
        if not families:
            raise ArgumentError(f"backend: {found.name} has no family {wanted!r}")
        where = torch.device(device) if device is not None else default_device(families)
        target = dispatch.target_of(where)
        runs = [f for f in families if not dispatch.device_refusals(f, target) and not found.available(f.name, target)]
        name = f"{found.name}:{wanted}" if wanted else found.name
        subject = Subject(name, where, found, _widest(runs or families))
        if config:
            subject = stack.enter_context(_configured(subject, _suffix(config), config))
        before = settings.current()
        stack.enter_context(settings.override(debug=before.debug | {"poison"}))
        yield subject


def backend_named(name: str) -> Backend:
    """A registered backend. Raises ArgumentError."""
    return _entry(name, name)


def _suffix(config: Mapping[str, Any]) -> str:
    return "_".join(f"{value}" if name == "fault" else f"{name}_{value}" for name, value in config.items())


def _name_part(text: str) -> str:
    """text with only what a backend's name may hold."""
    return "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in text.lower())


def _entry(name: str, given: str) -> Backend:
    for entry in registry.entries():
        if entry.name == name:
            if entry.backend is None:
                raise ArgumentError(f"backend: {name} could not be loaded: {entry.refusal}")
            return entry.backend
    raise ArgumentError(f"backend: no backend is called {given!r}; known: {', '.join(registry.names())}, tiled")


@contextlib.contextmanager
def _registered(backend: Backend) -> Iterator[None]:
    registry.register_backend(backend)
    try:
        yield
    finally:
        registry.unregister_backend(backend.name)
