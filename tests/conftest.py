"""Shared fixtures. Torch is single-threaded, so that the tests of several processes do not fight over two cores."""

from __future__ import annotations

import pytest
import torch
from tiny_kernel import csrc, folder  # noqa: F401 (fixtures)

from attnlib import dispatch, registry


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _synchronous(request):
    """Errors of a GPU test's kernels are its own."""
    yield
    if request.node.get_closest_marker("gpu") and torch.cuda.is_available():
        torch.cuda.synchronize()


@pytest.fixture
def register():
    """register(backend) for one test."""
    import attnlib

    added = []

    def add(backend):
        attnlib.register_backend(backend)
        added.append(backend.name)
        return backend

    yield add
    for name in added:
        registry.unregister_backend(name)
    dispatch.clear_caches()
