"""The JIT and the launcher on a real GPU: streams, threads, graphs, devices, shared memory, clusters, errors."""

from __future__ import annotations

import dataclasses
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_kernel import SPEC, csrc, folder, with_head_dim  # noqa: F401 (fixtures)

from attnlib.errors import KernelError
from attnlib_cuda import device, jit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU"),
]

COUNT = 1000
BLOCKS = (COUNT + 127) // 128


@pytest.fixture(autouse=True)
def kernels(folder: Path) -> Iterator[None]:  # noqa: F811
    yield
    torch.cuda.synchronize()


def expected(index: int = 0) -> int:
    return 64 + device.info(index).capability


def launch(out: torch.Tensor, kernel: jit.LoadedKernel | None = None, smem: int = 0, **more: object) -> None:
    index = out.device.index
    kernel = kernel or jit.load(SPEC, index)
    stream = torch.cuda.current_stream(out.device).cuda_stream
    params = struct.pack("<Qq", out.data_ptr(), out.numel())
    kernel.launch((BLOCKS, 1, 1), stream, params, smem, **more)  # type: ignore[arg-type]


def fresh(index: int = 0) -> torch.Tensor:
    return torch.full((COUNT,), float("nan"), device=f"cuda:{index}")


def test_device_info() -> None:
    properties = torch.cuda.get_device_properties(0)
    info = device.info(0)
    assert info.capability == 10 * properties.major + properties.minor and info.name == properties.name
    assert info.sm_count == properties.multi_processor_count and info.l2_bytes == properties.L2_cache_size
    assert info.smem_per_block == properties.shared_memory_per_block_optin
    typical = device.for_arch(f"sm_{info.capability}")
    assert (typical.arch, typical.smem_per_block, typical.smem_per_sm) == (
        info.arch, info.smem_per_block, info.smem_per_sm,
    )  # fmt: skip


def test_launch_in_torchs_context() -> None:
    out = fresh()
    launch(out)
    assert (out == expected()).all()
    kernel = jit.load(SPEC, 0)
    assert kernel._kernel.parameter_bytes in (0, 16)
    assert kernel._kernel.attribute(4) == kernel.registers  # what the log says is what was loaded
    assert kernel.blocks_per_sm(0) > 1


def test_launch_is_ordered_in_a_side_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = torch.zeros(COUNT, device="cuda")
        torch.cuda._sleep(20_000_000)
        launch(out)
        doubled = out * 2
    stream.synchronize()
    assert (doubled == 2 * expected()).all()


def test_threads_without_a_context() -> None:
    """A thread that never touched CUDA has no current context."""
    outs = [fresh() for _ in range(8)]
    kernel, stream = jit.load(SPEC, 0), torch.cuda.current_stream().cuda_stream
    errors: list[BaseException] = []

    def work(out: torch.Tensor, address: int) -> None:
        try:
            for _ in range(50):
                kernel.launch((BLOCKS, 1, 1), stream, struct.pack("<Qq", address, COUNT), 0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(out, out.data_ptr())) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not errors and all((out == expected()).all() for out in outs)


def test_every_device_whichever_is_current() -> None:
    for index in range(torch.cuda.device_count()):
        for current in range(torch.cuda.device_count()):
            with torch.cuda.device(current):
                out = fresh(index)
                launch(out)
                assert torch.cuda.current_device() == current
                assert (out == expected(index)).all()


def test_graph_capture_with_a_first_load_inside() -> None:
    out = fresh()
    spec = dataclasses.replace(SPEC, entry="loaded_in_capture")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(out, jit.load(spec, 0))
    torch.cuda.synchronize()
    assert out.isnan().all()  # captured, not run
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert (out == expected()).all()


def test_shared_memory_beyond_48_kb_and_beyond_the_device() -> None:
    out = fresh()
    most = device.info(0).smem_per_block
    launch(out, smem=most)
    assert (out == expected()).all()
    with pytest.raises(KernelError) as caught:
        launch(out, smem=most + 1024, problem="the problem")
    assert caught.value.problem == "the problem" and caught.value.kernel == "tiny"
    assert "CUDA_ERROR_INVALID_VALUE" in str(caught.value)
    out.fill_(0)
    launch(out)  # the process stays usable
    assert (out == expected()).all()


def test_clusters_and_programmatic_launch() -> None:
    if device.info(0).capability < 90:
        pytest.skip("needs sm_90")
    out = fresh()
    launch(out, cluster=(2, 1, 1))
    launch(out, pdl=True)
    launch(out, cluster=(4, 1, 1), pdl=True)
    assert (out == expected()).all()
    with pytest.raises(KernelError):
        launch(out, cluster=(3, 1, 1))  # 8 blocks are no multiple of 3


def test_tensor_map_of_a_real_tensor() -> None:
    if device.info(0).capability < 90:
        pytest.skip("needs sm_90")
    x = torch.zeros(4096, 16, 64, dtype=torch.bfloat16, device="cuda")
    host = device.host()
    made = host.encode_tiled(9, x.data_ptr(), [64, 4096, 16], [2048, 128], [64, 128, 1], [], 0, 3, 2, 0, 0)
    assert len(made) == 128 and any(made)
    with pytest.raises(host.DriverError):  # a box of more than 256
        host.encode_tiled(9, x.data_ptr(), [64, 4096, 16], [2048, 128], [64, 512, 1], [], 0, 3, 2, 0, 0)


def test_warm_load_is_quick() -> None:
    import time

    jit.load(SPEC, 0)  # makes the context
    times = []
    for head_dim in range(128, 192, 8):
        spec = with_head_dim(head_dim)
        jit.compile(spec, device.info(0).arch)
        began = time.perf_counter()
        jit.load(spec, 0)
        times.append(time.perf_counter() - began)
    print(f"cache to function: {min(times) * 1e3:.1f} ms at best")
    assert min(times) < 0.05  # others may use the machine


def test_tensor_map_in_a_thread_without_a_context() -> None:
    """A thread that never touched CUDA has no current context, which the driver wants."""
    if device.info(0).capability < 90:
        pytest.skip("needs sm_90")
    from concurrent.futures import ThreadPoolExecutor

    x = torch.zeros(16, 4096, 64, dtype=torch.bfloat16, device="cuda:0")
    arguments = (9, x.data_ptr(), [64, 4096, 16], [128, 524288], [64, 128, 1], [], 0, 3, 2, 0, 0)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(device.host().encode_tiled, *arguments).result()
    assert made == device.host().encode_tiled(*arguments)
