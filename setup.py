"""Package metadata. Ranges live here; the versions that were tested together are in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "([^"]+)"', (HERE / "luspo_megatron/__init__.py").read_text(encoding="utf-8"))
assert VERSION is not None

setup(
    name="luspo-megatron",
    version=VERSION[1],
    description="RLVR training of large MoE models with LUSPO on Megatron-core",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["luspo_megatron", "luspo_megatron.*"]),
    install_requires=[
        "torch>=2.9",
        "megatron-core>=0.19.2,<0.20",
        "transformers>=5",
        "safetensors",
        "psutil",
        "numpy",
        "pyyaml",
        "pyarrow",
        "tyro",
        "docstring-parser",
        "matplotlib",
        "rich",
        "aiohttp",
        "xxhash",
        "tensorboard",
        "jaxtyping",
        "math-verify",
        "reasoning-gym",
    ],
    extras_require={
        # Engines are servers in processes of their own and may live in another environment (see the README).
        "vllm": ["vllm"],
        "sglang": ["sglang"],
        # CUDA only: the bare transformer-engine package without its CUDA half breaks `import megatron.core`.
        "te": ["transformer-engine[pytorch,core_cu13]"],
        "trackers": ["wandb", "prometheus-client"],
        "demo": ["gguf", "accelerate"],  # examples/smollm2 unpacks a GGUF file with transformers
        "bench": ["liger-kernel==0.8.5"],  # the peer that make bench-loss compares with
        "dev": [
            "pytest",
            "pytest-timeout",
            "hypothesis",
            "ruff",
            "mypy",
            "import-linter",
            "jsonschema",
            "prometheus-client",
            "wandb",
        ],
    },
    entry_points={"console_scripts": ["luspo = luspo_megatron.cli:command"]},
    classifiers=[
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.12",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
