"""The cpu backend in its process: threads, fork, concurrent calls, memory, hidden work."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from cpu_problems import (
    BEST,
    BF16,
    F32,
    assert_close,
    bitwise,
    dense,
    outputs,
    plan_of,
    run,
    with_gradients,
)

import attnlib
from attnlib.problem import Window
from attnlib.reference import ReferencePlan


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shared", [None, (0,), (0, 1), (3,)])
def test_results_do_not_depend_on_threads(threads, dtype, shared):
    """AB-074, with a single head so that several threads share its dq."""
    torch.manual_seed(15)
    options = {"bias": F32, "grads": ("q", "k", "v", "bias")} if shared else {}
    problem, tensors = dense(
        batch=2, seqlen_q=300, seqlen_k=400, heads=2, heads_kv=1, dim=64, dtype=dtype, window=Window(250, 0), **options
    )
    if shared:
        for axis in shared:
            tensors.bias = tensors.bias.narrow(axis, 0, 1)
        tensors.bias = tensors.bias.expand(2, 2, 300, 400)
    with_gradients(tensors, problem)
    plan = plan_of(problem, block_q=32, block_k=32)
    results = []
    for count in (1, 2, 3, 8, 8, 8):
        threads(count)
        results.append(run(plan, problem, tensors))
    for other in results[1:]:
        bitwise(results[0], other)
    assert_close(problem, results[0], run(ReferencePlan(), problem, tensors))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_forward_does_not_depend_on_block_q(dtype):
    torch.manual_seed(16)
    problem, tensors = dense(seqlen_q=100, seqlen_k=150, dim=64, window=Window(None, 0), grads=(), dtype=dtype)
    results = [run(plan_of(problem, block_q=n, block_k=48), problem, tensors) for n in (7, 32, 100)]
    bitwise(results[0], results[1], ("out", "lse"))
    bitwise(results[0], results[2], ("out", "lse"))


def in_threads(count, work):
    """work() in so many threads at once; raises what one of them raised."""
    with ThreadPoolExecutor(count) as pool:
        for call in [pool.submit(work) for _ in range(count)]:
            call.result()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_concurrent_calls(threads, dtype):
    torch.manual_seed(17)
    threads(2)
    problem, tensors = dense(batch=2, seqlen_q=200, seqlen_k=200, dim=64, dtype=dtype)
    with_gradients(tensors, problem)
    plan = plan_of(problem)
    expected = run(plan, problem, tensors)

    def work():
        torch.set_num_threads(2)
        for _ in range(20):
            bitwise(expected, run(plan, problem, tensors))

    in_threads(4, work)


def test_a_child_that_was_forked_before_the_first_call():
    """Torch's threads stay behind in the parent, and the module is loaded after the fork."""
    program = (
        "import os, signal, numpy as np, torch, attnlib\n"
        "torch.set_num_threads(3)\n"
        "torch.exp(torch.randn(2000, 2000))\n"
        "q = torch.randn(1, 256, 4, 64)\n"
        "child = os.fork()\n"
        "signal.alarm(60)\n"
        "out = attnlib.attention(q, q, q, backend='cpu')\n"
        "if child == 0:\n"
        "    x = q.numpy()[0].astype(np.float64)\n"  # in float32 this side is off by 1e-5 now and then
        "    p = np.exp(np.einsum('ihd,jhd->hij', x, x) / 8)\n"
        "    want = np.einsum('hij,jhd->ihd', p / p.sum(-1, keepdims=True), x)\n"
        "    os._exit(7 if abs(out.numpy()[0] - want).max() < 1e-5 else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_forked_child_has_a_pool_of_its_own(threads, dtype):
    """And what the operating system allowed its parent: AMX."""
    torch.manual_seed(18)
    threads(3)
    problem, tensors = dense(batch=4, seqlen_q=200, seqlen_k=200, dim=64, dtype=dtype)
    with_gradients(tensors, problem)
    plan = plan_of(problem)
    expected, result = run(plan, problem, tensors), outputs(problem, tensors)
    before, after = (
        {n: getattr(x, n).view(torch.int32) for n in ("out", "lse", "dq", "dk", "dv")} for x in (expected, result)
    )  # NumPy knows no bfloat16

    def same():  # torch's own threads do not survive a fork: no torch kernel may run in the child
        names = ("out", "lse", "dq", "dk", "dv")
        return all(x.numpy().tobytes() == y.numpy().tobytes() for x, y in ((before[n], after[n]) for n in names))

    child = os.fork()
    if child == 0:  # pragma: no cover
        code = 1
        try:
            plan.forward(problem, result)
            plan.backward(problem, result)
            code = 0 if same() else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:  # pragma: no cover
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 0
    bitwise(expected, run(plan, problem, tensors))


def run_apart(code):
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


APART = """
    import resource, torch, attnlib_cpu
    from attnlib.backend import Target
    from attnlib.problem import AttentionProblem, Tensors
    torch.set_num_threads(2)
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    def go(s, d=16, heads=1):
        q, k, v, out, dout, dq, dk, dv = (torch.zeros(1, s, heads, d) for _ in range(8))
        problem = AttentionProblem(torch.float32, 1, s, s, heads, heads, d, d, 1.0, grads=("q", "k", "v"))
        plan = attnlib_cpu.backend.plan(problem, FAMILY, Target("cpu", "x86_64"))
        t = Tensors(q, k, v, out, torch.zeros(1, heads, s), dout=dout, dq=dq, dk=dk, dv=dv)
        plan.forward(problem, t)
        plan.backward(problem, t)
""".replace("FAMILY", repr(BEST))


def test_memory_grows_with_the_length_and_not_with_its_square():
    """An 8192 x 8192 matrix of float32 is 256 MiB; the operands are 4 MiB."""
    grown = run_apart(APART + "    go(64); before = peak(); go(8192); print(peak() - before)")
    assert float(grown) < 40


def test_one_long_sequence_does_not_cost_memory_for_every_short_one():
    """20000 sequences of 2 beside one of 400; a copied tile is some 50 KiB, operands and sums are 20 MiB each."""
    grown = run_apart(
        """
        import resource, torch, attnlib
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        def go(lengths):
            cu = torch.tensor([0, *lengths]).cumsum(0).int()
            q, k, v = (torch.zeros(int(cu[-1]), h, 32, requires_grad=True) for h in (4, 1, 1))
            attnlib.attention_varlen(q, k, v, cu, cu, causal=True, backend="cpu").sum().backward()
        go([2, 400]); before = peak(); go([2] * 20000 + [400]); print(peak() - before)
        """
    )
    assert float(grown) < 300


def test_running_out_of_memory_is_an_exception():
    out = run_apart(
        APART
        + """
    go(64)
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    q, k = torch.zeros(1, 1, 1, 8).expand(1, 1 << 22, 1, 8), torch.zeros(1, 512, 1, 8)
    lse = torch.zeros(1, 1, 1 << 22)
    # keys of more than one block: the sum of dq alone needs 256 MiB
    problem = AttentionProblem(torch.float32, 1, 1 << 22, 512, 1, 1, 8, 8, 1.0, grads=("q",))
    plan = attnlib_cpu.backend.plan(problem, FAMILY, Target("cpu", "x86_64"))
    t = Tensors(q, k, k, q, lse, dout=q, dq=q)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
    try:
        plan.backward(problem, t)
    except MemoryError:
        print("MemoryError")
    """.replace("FAMILY", repr(BEST))
    )
    assert out.strip() == "MemoryError"


def test_masked_blocks_cost_nothing():
    torch.manual_seed(19)
    problem, tensors = dense(
        batch=1, seqlen_q=1536, seqlen_k=1536, heads=1, heads_kv=1, dim=64, block_mask=(64, 64), grads=()
    )
    plan = plan_of(problem)

    def seconds(blocks):
        best = math.inf
        result = outputs(problem, replace(tensors, block_mask=blocks.expand(1, 1, 24, 24)))
        for _ in range(7):
            start = time.process_time()
            plan.forward(problem, result)
            best = min(best, time.process_time() - start)
        return best

    quarter = (torch.arange(24)[:, None] + 5 * torch.arange(24)[None]) % 4 == 0
    assert seconds(torch.ones(24, 24, dtype=torch.bool)) > 2.5 * seconds(quarter)  # 3.4 when nothing disturbs it


def test_importing_the_entry_point_is_light():
    code = """
    import sys, time, torch, attnlib.backend
    start = time.perf_counter()
    import attnlib_cpu
    print(time.perf_counter() - start, "attnlib_cpu._cpu" in sys.modules)
    """
    seconds, loaded = run_apart(code).split()
    assert float(seconds) < 0.02 and loaded == "False"


def test_products_of_torch_in_between_change_nothing():
    """Both may set the tiles of AMX, in any thread."""
    torch.manual_seed(8)
    q, k, v = (torch.randn(2, 150, heads, 64, dtype=BF16) for heads in (8, 2, 2))
    a = torch.randn(256, 256, dtype=BF16)

    def both():
        return attnlib.attention(q, k, v, backend="cpu"), a @ a, attnlib.attention(q[:, :1], k, v, backend="cpu")

    first = both()

    def work():
        for _ in range(20):
            assert all(torch.equal(x, y) for x, y in zip(both(), first, strict=True))

    in_threads(3, work)
