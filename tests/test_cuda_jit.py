"""From a Config to a cubin, without a GPU."""

from __future__ import annotations

import dataclasses
import enum
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_kernel import (
    SPEC,
    Config,
    entry,
    fresh,
    with_head_dim,
)

from attnlib import settings
from attnlib.errors import KernelError
from attnlib_cuda import device, jit, nvrtc, sources
from attnlib_cuda.matrix import ARCHS

# --- rendering and digest ---------------------------------------------------------------------------------------------


def test_render() -> None:
    class Mode(enum.Enum):
        CAUSAL = 2

    @dataclasses.dataclass(frozen=True)
    class Everything:
        element: torch.dtype = torch.float16
        accumulate: str = "float32"
        head_dim: int = 128
        causal: bool = True
        cut: float = 1.5
        big: int = 2**40
        mode: Mode = Mode.CAUSAL

    spec = jit.KernelSpec("a.cuh", "entry", Everything(), 256, 2, "attnlib::forward", "attnlib::Some", 96)
    assert jit.render(spec, "sm_90a") == textwrap.dedent("""\
        namespace attnlib { struct half; struct bfloat16; }
        struct Config {
            using element = attnlib::half;
            using accumulate = float;
            static constexpr int head_dim = 128;
            static constexpr bool causal = true;
            static constexpr float cut = 0x1.8000000000000p+0f;
            static constexpr long long big = 1099511627776LL;
            static constexpr int mode = 2;
            static constexpr int threads = 256;
            static constexpr int min_blocks = 2;
            static constexpr int arch = 90;
        };
        #include "a.cuh"
        static_assert(sizeof(attnlib::Some) == 96, "params_size and struct attnlib::Some differ");
        extern "C" __global__ void __launch_bounds__(Config::threads, Config::min_blocks)
        entry(const __grid_constant__ attnlib::Some params) { attnlib::forward<Config>(params); }
        """)


@pytest.mark.parametrize("value", [None, (1, 2), "half", float("nan"), 2**70, 1j])
def test_render_refuses_what_it_cannot_write(value: Any) -> None:
    made = dataclasses.make_dataclass("Odd", [("field", object, value)], frozen=True)
    with pytest.raises(TypeError, match="config field field: needs"):
        jit.render(dataclasses.replace(SPEC, config=made()), "sm_80")


def test_a_config_may_repeat_the_launch_bounds_but_not_contradict_them() -> None:
    made = dataclasses.make_dataclass("Bounds", [("threads", int, 128)], frozen=True)
    assert jit.render(dataclasses.replace(SPEC, config=made()), "sm_80").count("threads = 128") == 1
    with pytest.raises(ValueError, match=r"config\.threads is 128, but 64"):
        jit.render(dataclasses.replace(SPEC, config=made(), threads=64), "sm_80")


def test_digest_covers_what_decides_the_code_and_nothing_else(folder: Path, csrc: Path) -> None:
    def digest(spec: jit.KernelSpec = SPEC, arch: str = "sm_80") -> str:
        sources.reset()
        return jit.digest(spec, arch)

    first = digest()
    others = [
        digest(with_head_dim(128)), digest(arch="sm_86"), digest(dataclasses.replace(SPEC, options=("-lineinfo",))),
        digest(dataclasses.replace(SPEC, threads=64)), digest(dataclasses.replace(SPEC, entry="other")),
    ]  # fmt: skip
    assert len({first, *others}) == 6
    assert digest(dataclasses.replace(SPEC, pointers=(("out", 0),))) == first  # the launcher's affair
    (csrc / "cuda/unused.cuh").write_text("nobody includes this")
    (csrc / "common/philox.h").write_text("// nor this")
    os.utime(csrc / "cuda/tiny.cuh")
    assert digest() == first
    (csrc / "common/types.h").write_text((csrc / "common/types.h").read_text() + "// changed, two includes away\n")
    assert digest() != first


def test_digest_is_the_same_in_every_process(folder: Path, csrc: Path) -> None:
    code = f'sources.use(Path({str(csrc)!r}))\nprint(jit.digest(SPEC, "sm_90a"))'
    assert fresh(code, PYTHONHASHSEED="1").strip() == jit.digest(SPEC, "sm_90a")


def test_includes(folder: Path, csrc: Path) -> None:
    (csrc / "cuda/ptx").mkdir()
    (csrc / "cuda/ptx/copy.cuh").write_text('#include "types.h"\n#  include  "../shared.cuh"\n// #include "none.h"\n')
    (csrc / "cuda/ptx/types.h").write_text("#pragma once\n")
    (csrc / "cuda/shared.cuh").write_text("#pragma once\n")
    sources.reset()
    text, reached = sources.canonical('#include "ptx/copy.cuh"\n#include "types.h"\n', "cuda")
    assert text == '#include "cuda/ptx/copy.cuh"\n#include "common/types.h"\n'
    assert list(sources.closure(reached)) == [
        "common/types.h", "cuda/ptx/copy.cuh", "cuda/ptx/types.h", "cuda/shared.cuh",
    ]  # fmt: skip
    with pytest.raises(KernelError, match=r'tiny: #include "gone.cuh" in csrc/cuda: no such file'):
        jit.compile(dataclasses.replace(SPEC, file="gone.cuh"), "sm_80")


def test_sources_of_this_installation_are_found() -> None:
    sources.use(None)
    assert (sources.csrc() / "common/philox.h").is_file()


# --- compiling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture(arch: str, folder: Path) -> None:
    made = jit.compile(SPEC, arch)
    assert made.cubin[:4] == b"\x7fELF" and 0 < made.registers < 64
    assert made.spills == made.stack == 0 and made.warnings == () and made.seconds > 0
    assert made.path == entry(folder)
    files = {path.name: path for path in made.path.iterdir()}
    assert set(files) == {"kernel.cubin", "kernel.cu", "kernel.log", "entry.json"}
    assert files["kernel.cubin"].read_bytes() == made.cubin
    assert "registers" in files["kernel.log"].read_text()
    source = files["kernel.cu"].read_text()
    assert jit.render(SPEC, arch).replace('"tiny', '"cuda/tiny') in source and "// common/window.h" in source


def test_compiling_is_deterministic_and_the_second_call_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jit.compile(SPEC, "sm_90a")
    assert jit.compile(SPEC, "sm_90a", force=True).cubin == first.cubin
    monkeypatch.setattr(nvrtc, "find", lambda: pytest.fail("compiled again"))
    again = jit.compile(SPEC, "sm_90a")
    assert again.cubin == first.cubin and again.seconds == 0
    assert dataclasses.replace(again, seconds=first.seconds) == first


def test_errors_name_the_kernel_and_the_problem(folder: Path) -> None:
    with pytest.raises(KernelError, match="params_size and struct attnlib::Params differ") as caught:
        jit.compile(dataclasses.replace(SPEC, params_size=24), "sm_80", "the problem")
    assert caught.value.problem == "the problem" and caught.value.kernel == "tiny"
    assert "tiny does not compile for sm_80" in str(caught.value) and "the problem" in str(caught.value)


@dataclasses.dataclass(frozen=True)
class Sized(Config):
    shared_bytes = 8


def test_shared_memory_is_compared_at_compile_time(folder: Path) -> None:
    spec = dataclasses.replace(SPEC, config=Sized())
    jit.compile(dataclasses.replace(spec, shared="8"), "sm_80")
    with pytest.raises(KernelError, match="16 and config.shared_bytes differ"):
        jit.compile(dataclasses.replace(spec, shared="16"), "sm_80")


def test_spills_are_seen(folder: Path) -> None:
    spec = dataclasses.replace(SPEC, entry="spilling", function="attnlib::spilling", config=Config(300))
    made = jit.compile(spec, "sm_80")
    assert made.spills > 0 and made.registers == 255
    assert jit.compile(spec, "sm_80").spills == made.spills  # from the cache, too


def test_serialised_wgmma_is_seen(folder: Path) -> None:
    made = jit.compile(dataclasses.replace(SPEC, entry="serialised", function="attnlib::serialised"), "sm_90a")
    assert any("C75" in line for line in made.warnings), made.log


def test_read_log() -> None:
    log = textwrap.dedent("""\
        ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
        ptxas info    : Compiling entry function 'k' for 'sm_90a'
        ptxas         .     64 bytes stack frame, 108 bytes spill stores, 8 bytes spill loads
        ptxas info    : Used 168 registers, used 2 barriers, 64 bytes cumulative stack size
        ptxas         .     8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        ptxas warning : setmaxnreg ignored
        """)
    found = jit.read_log(log)
    assert (found["registers"], found["stack"], found["spills"], len(found["warnings"])) == (168, 72, 116, 2)


def test_no_nvrtc(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = jit.compile(SPEC, "sm_80")

    def missing() -> nvrtc.Nvrtc:
        raise nvrtc.NvrtcMissing(f"NVRTC was not found ({nvrtc.REMEDY})")

    monkeypatch.setattr(nvrtc, "find", missing)
    monkeypatch.setattr(nvrtc, "version", lambda: None)
    assert jit.compile(SPEC, "sm_80").cubin == made.cubin  # a filled cache is enough
    with pytest.raises(KernelError, match="pip install"):
        jit.compile(SPEC, "sm_86")


def test_the_version_is_known_without_loading_the_library() -> None:
    code = """
        assert nvrtc.version() is not None
        print("libnvrtc" in open("/proc/self/maps").read(), nvrtc.version() == nvrtc.find().version)
    """
    loaded, same = fresh(code).split()
    assert same == "True"
    assert loaded == "False" or not list(nvrtc._wheels())


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "version", "expected"),
    [
        ("sm_75", (13, 0), "sm_75"), ("sm_80", (13, 0), "sm_80"), ("sm_90", (13, 0), "sm_90a"),
        ("sm_90a", (12, 0), "sm_90a"), ("sm_100", (13, 0), "sm_100"), ("sm_103", (12, 8), "sm_100"),
        ("sm_121", (12, 8), "sm_120"), ("sm_88", (12, 0), "sm_87"), ("sm_100", (12, 4), None),
        ("sm_130", (13, 0), None), ("sm_70", (13, 0), None), ("gfx942", (13, 0), None),
    ],
)  # fmt: skip
def test_compile_arch(arch: str, version: tuple[int, int], expected: str | None) -> None:
    assert device.compile_arch(arch, version) == expected


def test_typical_devices() -> None:
    h100 = device.for_arch("sm_90")
    assert (h100.arch, h100.capability, h100.sm_count, h100.smem_per_block) == ("sm_90a", 90, 132, 227 << 10)
    assert device.for_arch("sm_86").smem_per_block == 99 << 10
    with pytest.raises(ValueError, match="sm_75 or later"):
        device.for_arch("sm_70")


class FakeHost:
    class DriverError(RuntimeError):
        pass

    def __init__(self, driver: int | None) -> None:
        self.driver = driver

    def driver_version(self) -> int:
        if self.driver is None:
            raise self.DriverError(-1, "NO_DRIVER", "no NVIDIA driver: libcuda.so.1", "dlopen")
        return self.driver


def refused(monkeypatch: pytest.MonkeyPatch, arch: str = "sm_80", driver: int | None = 13000, **more: Any) -> str:
    from attnlib.backend import Target

    monkeypatch.setattr(device, "host", lambda: FakeHost(driver))
    monkeypatch.setattr(nvrtc, "version", lambda: more.get("version", (13, 0)))
    found = device.refusals(Target("cuda", arch, 0, more.get("present", True)))
    return "; ".join(f"{refusal.code.value} {refusal}" for refusal in found)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert refused(monkeypatch) == ""
    assert "arch architecture: needs sm_75 or later, got sm_70" in refused(monkeypatch, "sm_70")
    assert "got sm_130 with NVRTC 13.0" in refused(monkeypatch, "sm_130")
    assert "driver driver: needs an NVIDIA driver, got no NVIDIA driver" in refused(monkeypatch, driver=None)
    assert refused(monkeypatch, driver=None, present=False) == ""
    old = refused(monkeypatch, driver=12040)
    assert "needs one for CUDA 13.0 or later, as NVRTC is 13.0, got CUDA 12.4 (update the driver" in old
    assert "package NVRTC: needs libnvrtc 12 or later, got none (pip install" in refused(monkeypatch, version=None)
    with settings.override(jit="never"):
        assert refused(monkeypatch, version=None) == ""  # a filled cache needs no compiler
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "package torch: needs a CUDA build of torch, got torch for ROCm 6.4" in refused(monkeypatch)


# --- time -------------------------------------------------------------------------------------------------------------


def test_warm_start_is_quick(folder: Path, csrc: Path) -> None:
    cold = jit.compile(SPEC, "sm_90a")
    code = f"""
        sources.use(Path({str(csrc)!r}))
        began = time.perf_counter()
        made = jit.compile(SPEC, "sm_90a")
        assert made.seconds == 0
        print(time.perf_counter() - began)
    """
    warm = min(float(fresh(code)) for _ in range(2))
    print(f"NVRTC {cold.seconds * 1e3:.0f} ms, first kernel of a process from the cache {warm * 1e3:.1f} ms")
    assert warm < 0.05
