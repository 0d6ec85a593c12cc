"""What is here: versions, the device, and what is missing for whole checks or for Maniple's own processes."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

from gpu_checks.outcome import Report

_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "safetensors",
    "grpcio",
    "protobuf",
    "googleapis-common-protos",
    "structlog",
    "psutil",
    "numba",
    "torch-memory-saver",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
_OPTIONAL = ("numba", "torch-memory-saver", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "transformers")


def run(device: str, report: Report) -> None:
    found, missing = {}, []
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    report.facts["python"] = platform.python_version()
    report.facts["packages"] = found
    needed = [name for name in missing if name not in _OPTIONAL]
    if needed:
        requirements = Path(__file__).resolve().parents[1] / "requirements.txt"
        report.not_run.append(f"what needs {', '.join(needed)}: pip install --target DIR -r {requirements}")
    report.facts["not installed"] = [name for name in missing if name in _OPTIONAL]
    if device != "cuda":
        return
    import torch

    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    report.facts["device"] = properties.name
    report.facts["compute capability"] = f"{properties.major}.{properties.minor}"
    report.facts["multiprocessors"] = properties.multi_processor_count
    report.facts["memory, free and total, GiB"] = [round(free / 2**30, 2), round(total / 2**30, 2)]
    report.facts["CUDA of torch"] = torch.version.cuda
    report.facts["devices"] = torch.cuda.device_count()
    if torch.distributed.is_nccl_available():
        report.facts["NCCL of torch"] = ".".join(map(str, torch.cuda.nccl.version()))
