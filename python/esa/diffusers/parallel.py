# SPDX-License-Identifier: Apache-2.0
"""One video on several GPUs, and one program on several processes.

Ulysses: tokens are spread over the ranks everywhere but in self-attention; there an all-to-all exchange gives each rank
all tokens of some heads, esa computes those, and a second exchange spreads the tokens again. diffusers does the
spreading (`enable_parallelism`), this file the exchange around esa's operator. Masks are per head, so a rank uses its
part of a mask file (from its first head on); selectors that look at one head at a time choose what they would choose on
one GPU, and entropy online shares the budget among the heads of a rank.

`launch` starts the processes of `--gpus N`; under torchrun they are there already."""
from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch  # imported where it is used: evaluating and exporting work without

# ---------------------------------------------------------------- processes

def rank() -> int:
    """The number of this process in the run."""
    return int(os.environ.get("RANK", 0)) if size() > 1 else 0


def size() -> int:
    """The number of processes of this run."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _check(number: int, device: str | None) -> None:
    import torch
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device is None or not device.startswith("cpu")) and gpus < number:
        raise ValueError(
            f"--gpus {number} was asked for, this machine has {gpus} (--device cpu runs the processes on the CPU)")


def launch(number: int, device: str | None, module: str, arguments: Sequence[str]) -> int | None:
    """Runs `python -m module arguments` in `number` processes and returns the exit status. None if this process is one
    of them, or the only one, and must do the work itself."""
    if number <= 1 or size() > 1:
        if size() > 1 and number not in (1, size()):
            raise ValueError(f"--gpus {number} was asked for, but {size()} processes were started")
        return None
    _check(number, device)
    shared = dict(os.environ, WORLD_SIZE=str(number), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    children = [
        subprocess.Popen([sys.executable, "-m", module, *arguments], env=dict(shared, RANK=str(i), LOCAL_RANK=str(i)))
        for i in range(number)
    ]
    try:
        return _wait(children)
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
        for child in children:
            child.wait()


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    """Waits for all. After the first failure returns at once, because the others would wait for it for ever."""
    import time
    while True:
        states = [child.poll() for child in children]
        failed = [s for s in states if s not in (None, 0)]
        if failed:
            return failed[0] if failed[0] is not None and failed[0] > 0 else 1
        if all(s == 0 for s in states):
            return 0
        time.sleep(0.05)


def device(asked: str | None) -> str | None:
    """The device of this process."""
    if size() == 1 or (asked is not None and asked.startswith("cpu")):
        return asked
    _check(size(), asked)
    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"


def join(where: str | torch.device) -> None:
    """Makes this process a member of the run. May be called again."""
    import torch
    import torch.distributed as dist
    if dist.is_initialized():
        return
    where = torch.device(where)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo")


def finish() -> None:
    """Leaves the run, if this process is in one."""
    if _joined():
        sys.modules["torch"].distributed.destroy_process_group()


def barrier() -> None:
    """Waits for the others, in a run that has others."""
    if _joined():
        sys.modules["torch"].distributed.barrier()


def _joined() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


# ---------------------------------------------------------------- Ulysses

def enable_ulysses(pipe: Any) -> None:
    """Spreads the tokens of a pipeline's transformers over all processes of this run, through diffusers' context
    parallelism."""
    import torch
    from diffusers import ContextParallelConfig
    if not hasattr(torch, "accelerator"):
        raise RuntimeError(
            f"diffusers spreads models over processes with torch 2.6 or newer only; this is torch {torch.__version__}")
    parts = [
        part for part in (getattr(pipe, name, None) for name in ("transformer", "transformer_2")) if part is not None
    ]
    join(getattr(pipe, "_execution_device", None) or parts[0].device)       # offloaded parts wait on the CPU
    for part in parts:
        heads = part.config.num_attention_heads
        if heads % size():
            raise ValueError(f"{heads} heads cannot be shared evenly by {size()} processes")
        if getattr(part, "_cp_plan", None) is None:
            raise ValueError(
                f"diffusers cannot spread {type(part).__name__} over several GPUs (it has no plan for context "
                "parallelism): use one GPU, or start several runs")
        with _counting_the_cpu(part.device.type):
            part.enable_parallelism(config=ContextParallelConfig(ulysses_degree=size()))


@contextlib.contextmanager
def _counting_the_cpu(kind: str) -> Iterator[None]:
    """diffusers takes the rank modulo the number of accelerators, which is none on a CPU: there one is counted."""
    import torch
    if kind != "cpu" or torch.cuda.is_available():
        yield
        return
    original = torch.accelerator.device_count
    torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = original


def _ulysses(config: Any) -> Any:
    """The context-parallel part of a processor's _parallel_config, checked."""
    cp = getattr(config, "context_parallel_config", config)
    if getattr(cp, "ring_degree", 1) not in (None, 1):
        raise ValueError(
            "esa runs under Ulysses only: ring attention would cut masks into pieces "
            "(ContextParallelConfig(ulysses_degree=N))")
    if getattr(cp, "ulysses_anything", False):
        raise ValueError("esa does not run under ulysses_anything: the tokens must divide evenly among the processes")
    return cp


def heads_of(config: Any, total: int) -> tuple[int, int]:
    """(first head of this rank, heads in all) under a _parallel_config; (0, 0) without one."""
    if config is None:
        return (0, 0)
    cp = _ulysses(config)
    return (cp._ulysses_local_rank * (total // cp.ulysses_degree), total)


def _exchange(x: torch.Tensor, group: Any) -> torch.Tensor:
    """All-to-all over the first dimension. The functional form, because torch.compile can see through it."""
    import torch.distributed._functional_collectives as functional
    shape = x.shape
    return functional.wait_tensor(functional.all_to_all_single(x.flatten(), None, None, group)).reshape(shape)


def ulysses_attention(processor: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """esa's attention of (B, tokens of this rank, H, D) tensors: every rank computes some heads over all tokens."""
    import torch
    cp = _ulysses(processor._parallel_config)
    ranks, group = cp.ulysses_degree, cp._ulysses_mesh.get_group()
    batch, tokens, heads, dim = query.shape
    if heads % ranks:
        raise ValueError(f"{heads} heads cannot be shared evenly by {ranks} processes")

    def to_heads(x: torch.Tensor) -> torch.Tensor:      # (B, n, H, D) -> (B, ranks * n, H / ranks, D)
        x = x.reshape(batch, x.shape[1], ranks, heads // ranks, dim).permute(2, 1, 0, 3, 4).contiguous()
        return _exchange(x, group).flatten(0, 1).permute(1, 0, 2, 3)

    out = torch.ops.esa.session_attention(processor.handle, processor.layer, to_heads(query), to_heads(key),
                                          to_heads(value))
    out = out.reshape(batch, ranks, tokens, heads // ranks, dim).permute(1, 3, 0, 2, 4).contiguous()
    return _exchange(out, group).flatten(0, 1).permute(1, 2, 0, 3).contiguous()
