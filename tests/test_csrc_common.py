"""csrc/common, the code that CPU and GPU kernels share: run on the host with g++, compiled for GPUs with NVRTC."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMON = ROOT / "csrc/common"
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")

needs_compiler = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")

PHILOX = """
#include <cstdio>
#include <cstdlib>
#include "philox.h"
using namespace attnlib;
int main(int argc, char** argv) {
    uint32_t v[6];
    for (int i = 1; i + 5 < argc; i += 6) {
        for (int j = 0; j < 6; ++j) v[j] = static_cast<uint32_t>(std::strtoul(argv[i + j], nullptr, 16));
        const PhiloxWords w = philox4x32_10(v[0], v[1], v[2], v[3], v[4] | static_cast<uint64_t>(v[5]) << 32);
        std::printf("%08x %08x %08x %08x\\n", w.word[0], w.word[1], w.word[2], w.word[3]);
    }
}
"""
DROPOUT = """
#include <cstdio>
#include "philox.h"
using namespace attnlib;
constexpr uint64_t kSeed = 0x123456789ABCDEF0;
int main() {
    const uint32_t at[][2] = {{0, 0}, {0, 1}, {8, 0}, {0, 8}, {16, 0}, {0, 32}, {7, 31}, {511, 767}, {599, 799}};
    for (const auto& p : at) std::printf("%u ", dropout_number(dropout_words(kSeed, 2, 1, p[0], p[1]), p[0], p[1]));
    long kept = 0, zero = 0, all = 0, one_call = 0;
    for (uint32_t i = 0; i < 600; ++i) {
        for (uint32_t j = 0; j < 800; ++j) {
            const PhiloxWords words = dropout_words(kSeed, 2, 1, i, j);
            const PhiloxWords shared = dropout_words(kSeed, 2, 1, i & ~8u, j & ~24u);
            kept += dropout_keeps(words, i, j, 6554);
            zero += dropout_keeps(words, i, j, 65536);
            all += dropout_keeps(words, i, j, 0);
            one_call += dropout_number(words, i, j) == dropout_number(shared, i, j);
        }
    }
    std::printf("%ld %ld %ld %ld\\n", kept, zero, all, one_call);
}
"""
PARTS = """
#include <cstdio>
#include "philox.h"
using namespace attnlib;
int main() {
    const auto product = [](uint32_t& low, uint32_t& high, uint32_t a, uint32_t b) {
        const uint64_t whole = static_cast<uint64_t>(a) * b;
        low = static_cast<uint32_t>(whole);
        high = static_cast<uint32_t>(whole >> 32);
    };
    long equal = 0;
    uint64_t seed = 0x123456789ABCDEF0;
    for (uint32_t n = 0; n < 1000; ++n) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const uint32_t c0 = static_cast<uint32_t>(seed >> 7), c1 = c0 * 77u, c2 = n % 5, c3 = n % 7;
        const PhiloxWords whole = philox4x32_10(c0, c1, c2, c3, seed);
        const PhiloxRow row = philox_row(seed, c1, c2, product);
        const PhiloxColumn column = philox_column(seed, c0, c2, c3, product);
        const PhiloxWords parts = philox_finish(seed, row, column, product);
        bool same = true;
        for (int i = 0; i < 4; ++i) same = same && whole.word[i] == parts.word[i];
        equal += same;
    }
    std::printf("%ld\\n", equal);
}
"""
WINDOW = """
#include <cstdio>
#include <initializer_list>
#include "window.h"
using attnlib::Window;
int main() {
    long checked = 0;
    for (int64_t q_len = 0; q_len < 7; ++q_len)
        for (int64_t kv_len = 0; kv_len < 9; ++kv_len)
            for (int64_t left = -1; left < 9; ++left)
                for (int64_t right = -1; right < 9; ++right)
                    for (int64_t offset : {int64_t(0), kv_len - q_len}) {
                        const Window w = {left, right, offset, q_len, kv_len};
                        for (int64_t i = 0; i < q_len; ++i) {
                            if (w.key_begin(i) < 0 || w.key_end(i) < 0 || w.key_end(i) > kv_len) return 1;
                            for (int64_t j = 0; j < kv_len + 2; ++j) {
                                const int64_t distance = j - (i + offset);
                                const bool seen = j < kv_len && (left < 0 || -left <= distance) &&
                                                  (right < 0 || distance <= right);
                                const bool from_key = j < kv_len && i >= w.query_begin(j) && i < w.query_end(j);
                                const bool in_range = j >= w.key_begin(i) && j < w.key_end(i);
                                if (w.sees(i, j) != seen || in_range != seen || from_key != seen) {
                                    std::printf("q %ld kv %ld window %ld,%ld offset %ld at %ld,%ld\\n", long(q_len),
                                                long(kv_len), long(left), long(right), long(offset), long(i), long(j));
                                    return 1;
                                }
                                ++checked;
                            }
                        }
                        for (int64_t j = 0; j < kv_len; ++j)
                            if (w.query_begin(j) < 0 || w.query_end(j) < 0 || w.query_end(j) > q_len) return 1;
                    }
    // Lengths and windows past 32 bits.
    const int64_t big = int64_t(1) << 40;
    const Window far = {big, 0, big - 10, 10, big};
    if (!far.sees(9, big - 1) || far.sees(8, big - 1) || far.key_begin(9) != 0 || far.key_end(0) != big - 9) return 1;
    std::printf("%ld\\n", checked);
}
"""


def run(text: str, folder: Path, *arguments: str) -> str:
    (folder / "test.cpp").write_text(text)
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-Werror"]
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    assert CXX is not None
    build = [CXX, *flags, *checks, f"-I{COMMON}", str(folder / "test.cpp"), "-o", str(folder / "test")]
    subprocess.run(build, check=True)
    done = subprocess.run([str(folder / "test"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_compiler
def test_philox_known_answers(tmp_path: Path) -> None:
    """The vectors of Random123: counter, key, result."""
    cases = {
        "0 0 0 0 0 0": "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        " ".join(["ffffffff"] * 6): "408f276d 41c83b0e a20bc7c6 6d5451fd",
        "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0": "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    words = " ".join(cases).split()
    assert run(PHILOX, tmp_path, *words).splitlines() == list(cases.values())


@needs_compiler
def test_philox_in_parts_is_philox(tmp_path: Path) -> None:
    assert run(PARTS, tmp_path) == "1000\n"


@needs_compiler
def test_dropout_numbers_of_the_contract(tmp_path: Path) -> None:
    found = [int(word) for word in run(DROPOUT, tmp_path).split()]
    assert found[:9] == [19606, 42457, 17412, 65300, 8198, 34412, 27739, 54308, 495]
    kept, zero, everything, one_call = found[9:]
    assert kept == 431554  # p = 0.1
    assert zero == 0 and everything == one_call == 600 * 800


@needs_compiler
def test_window_against_its_definition(tmp_path: Path) -> None:
    assert int(run(WINDOW, tmp_path)) > 100_000


@needs_compiler
@pytest.mark.parametrize("header", sorted(path.name for path in COMMON.glob("*.h")))
def test_each_header_stands_alone(header: str, tmp_path: Path) -> None:
    """Included first and twice, and nothing of the C++ library for NVRTC to miss."""
    run(f'#include "{header}"\n#include "{header}"\nint main() {{}}\n', tmp_path)
    text = (COMMON / header).read_text()
    assert "#pragma once" in text
    if header != "types.h":
        assert "#include <" not in text


def test_nvrtc_compiles_them_for_every_architecture() -> None:
    from attnlib_cuda import nvrtc
    from attnlib_cuda.matrix import ARCHS

    headers = {path.name: path.read_text() for path in COMMON.glob("*.h")}
    kernel = (
        "".join(f'#include "{name}"\n' for name in sorted(headers))
        + """
        static_assert(sizeof(int64_t) == 8 && sizeof(uint32_t) == 4 && sizeof(uint8_t) == 1, "");
        static_assert(sizeof(attnlib::Window) == 40, "");
        extern "C" __global__ void common(const __grid_constant__ attnlib::Window window, uint64_t seed, int64_t* out) {
            const int64_t i = blockIdx.x, j = threadIdx.x;
            const attnlib::PhiloxWords words = attnlib::dropout_words(seed, blockIdx.y, blockIdx.z, i, j);
            const bool kept = window.sees(i, j) && attnlib::dropout_keeps(words, i, j, 6554);
            out[i * blockDim.x + j] = kept ? window.query_begin(j) + window.query_end(j) : -1;
        }
    """
    )
    compiler = nvrtc.find()
    for arch in ARCHS:
        options = [f"--gpu-architecture={arch}", "-std=c++17", "--ptxas-options=-v"]
        made = compiler.compile(kernel, "common.cu", headers, options)
        assert made.cubin, made.log
        assert "0 bytes spill stores" in made.log
