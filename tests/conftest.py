"""Settings of the test suite: shapes in signatures are checked, one thread per worker, the same cases in every CI run."""

import importlib.util
import os

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

# Before anything imports the package: every call made by a test then has its shapes checked against the signature.
if importlib.util.find_spec("beartype"):
    # Not core.rows and core.conditioner: the compiler makes objects of their classes, and cannot read the checks of these.
    checked = ["math", "kernels", "ensemble", "core.moments"]
    install_import_hook([f"isaac_newton.{module}" for module in checked], "shapes.checker")

hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
