"""Compile the SIMT kernels for architectures that no other check reaches, without a GPU; anything but success fails.

    python ci/compile_simt.py               all of them
    python ci/compile_simt.py --only gfx    those whose name has this text

NVRTC 13 for sm_75, 80 and 90; NVRTC 12.9 for sm_60 and sm_70, which 13 has dropped; the clang of the ziglang wheel for
AMD's gfx90a, gfx942 (wavefronts of 64) and gfx1100 (32), with what HIP's own headers declare standing in front.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from attnlib.backend import Target
from attnlib.problem import AttentionProblem
from attnlib_cuda import nvrtc
from attnlib_cupy import config, source

# Which of problems() each architecture compiles: every compiler meets them all.
ARCHS = {
    "sm_60": (0, 2, 3), "sm_70": (1,),
    "sm_75": (2,), "sm_80": (1,), "sm_90": (0, 3),
    "gfx90a": (0, 3), "gfx942": (1,), "gfx1100": (2,),
}  # fmt: skip
DROPPED = ("sm_60", "sm_70")  # by NVRTC 13
FOLDERS = {12: "cuda_nvrtc/lib", 13: "cu13/lib"}
CUPY_FLAGS = ("--std=c++17", "--device-as-default-execution-space")
HIP = r"""
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
struct Index { unsigned x; };
#define threadIdx (Index{__builtin_amdgcn_workitem_id_x()})
#define blockIdx (Index{__builtin_amdgcn_workgroup_id_x()})
extern "C" __device__ float exp2f(float), fmaxf(float, float), fmaf(float, float, float), logf(float), tanhf(float);
extern "C" __device__ float fabsf(float);
extern "C" __device__ double exp(double), fmax(double, double), fma(double, double, double), log(double), tanh(double);
extern "C" __device__ double fabs(double);
__device__ void __syncthreads();
__device__ int __syncthreads_or(int);
__device__ float __shfl_xor(float, int);
__device__ double __shfl_xor(double, int);
"""


def problems() -> Iterator[AttentionProblem]:
    """A few that together reach every kernel, dtype and branch."""
    sizes = dict(batch=2, seqlen_q=1024, seqlen_k=1024, num_heads_q=4, num_heads_kv=2, scale=0.125)
    grads = ("q", "k", "v")
    yield AttentionProblem(torch.float32, head_dim=64, head_dim_v=64, **sizes)
    yield AttentionProblem(
        torch.bfloat16, head_dim=128, head_dim_v=80, softcap=30.0, bias=torch.float16, alibi=True, mask=True,
        block_mask=(64, 64), dropout_p=0.5, grads=(*grads, "bias", "sinks"), sinks=torch.float32, **sizes,
    )  # fmt: skip
    yield AttentionProblem(
        torch.float16, head_dim=40, head_dim_v=40, packed=True, page_size=16, aligned=False, grads=grads, **sizes
    )
    yield AttentionProblem(torch.float64, head_dim=64, head_dim_v=64, append=True, **sizes)


def kernels(arch: str) -> list[source.Kernel]:
    """What plans for the problems of arch launch on it."""
    target = Target("rocm" if arch.startswith("gfx") else "cuda", arch, present=False)
    found = []
    everything = list(problems())
    for problem in (everything[place] for place in ARCHS[arch]):
        forward = config.tile(problem, target, False)
        found.append(source.Kernel("forward", forward, 2))
        if problem.append:
            found.append(source.Kernel("append", config.rows_of(forward)))
        if problem.grads:
            shape = config.tile(problem, target, True)
            found += [source.Kernel(name, shape, 2) for name in ("query", "key")]
            found.append(source.Kernel("delta", config.rows_of(forward)))
        if "bias" in problem.grads:
            found.append(source.Kernel("bias", shape, 2))
        if "sinks" in problem.grads:
            found.append(source.Kernel("sink", config.rows_of(forward)))
    return found


def nvrtc_of(major: int) -> nvrtc.Nvrtc:
    """The NVRTC of a wheel. Raises NvrtcMissing."""
    import nvidia

    for root in nvidia.__path__:
        for path in sorted(Path(root, FOLDERS[major]).glob(f"libnvrtc.so.{major}")):
            return nvrtc.Nvrtc(str(path))
    raise nvrtc.NvrtcMissing(f"NVRTC {major} is not installed: pip install -e .[test]")


def compile_cuda(arch: str) -> list[str]:
    compiler = nvrtc_of(12 if arch in DROPPED else 13)
    faults = []
    for kernel in kernels(arch):
        options = (*CUPY_FLAGS, f"--gpu-architecture={arch}")
        output = compiler.compile(source.text(kernel), f"{kernel.entry}.cu", {}, options)
        if not output.cubin:
            faults.append(f"{arch} {kernel}: {output.log}")
    return faults


def compile_hip(arch: str) -> list[str]:
    command = [sys.executable, "-m", "ziglang", "clang", "-cc1", "-triple", "amdgcn-amd-amdhsa", "-x", "hip",
               "-aux-triple", "x86_64-unknown-linux-gnu", "-fcuda-is-device", "-std=c++17", "-O1", "-target-cpu", arch,
               "-D__HIPCC_RTC__", "-emit-obj"]  # fmt: skip
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        code, object_file = Path(folder) / "kernel.hip", Path(folder) / "kernel.o"
        for kernel in kernels(arch):
            code.write_text(HIP + source.text(kernel, hip=True))
            done = subprocess.run([*command, "-o", str(object_file), str(code)], capture_output=True, text=True)
            if done.returncode != 0 or not object_file.exists():
                faults.append(f"{arch} {kernel}: {done.stderr[-2000:]}")
            object_file.unlink(missing_ok=True)
    return faults


def compile_for(arch: str) -> tuple[str, list[str], float]:
    started = time.perf_counter()
    try:
        faults = compile_hip(arch) if arch.startswith("gfx") else compile_cuda(arch)
    except nvrtc.NvrtcMissing as error:
        faults = [f"{arch}: {error}"]
    return arch, faults, time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="architectures whose name has this text")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    options = parser.parse_args(arguments)
    archs = [arch for arch in ARCHS if options.only in arch]
    status = 0 if archs else 1
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for arch, faults, seconds in pool.map(compile_for, archs):
            print(f"{arch}: {len(kernels(arch))} kernels, {seconds:.1f} s", flush=True)
            for fault in faults:
                print(f"FAILED {fault}", file=sys.stderr)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
