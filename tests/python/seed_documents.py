# SPDX-License-Identifier: Apache-2.0
"""Every snippet and command line that the two originals' own documents show their users, word for word, in the order
they are shown.

What differs from the documents when they are run: model names are found under $ESA_MODELS (small pipelines with random
weights, pipelines.py) and the device "npu" is "cpu". `needs` names what a snippet uses without defining it. `slow`
ones run in make test-all."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Snippet:
    name: str
    document: str               # "ESA" or "MindIE-SD"
    kind: str                   # "python" or "shell"
    text: str
    slow: bool = False
    needs: str = ""             # Python that must have run before


def _esa(name, kind, text, **more):
    return Snippet(name, "ESA", kind, text, **more)


def _mindie(name, text, **more):
    return Snippet(name, "MindIE-SD", "python", text, **more)


SNIPPETS = (_esa("setup", "shell", "pip install -e .\npip install -e third_party/fa4", slow=True),
            _esa(
                "online mode", "python", '''from esa.processor import sparse_processor_mode, _make_step_callback
from esa.models import load_pipeline, generate_video

pipe = load_pipeline("wan-t2v-1.3b")

with sparse_processor_mode(pipe, mean_budget=0.5) as state:
    cb = _make_step_callback(state)
    video = generate_video(pipe, "A cat walking on grass", "wan-t2v-1.3b",
                           callback_on_step_end=cb)'''),
            _esa(
                "calibrate", "shell", r'''python scripts/calibrate.py \
    --model wan-t2v-1.3b \
    --height 720 --width 1280 \
    --num-prompts 5 \
    --budgets 0.7,0.5,0.3 \
    --output masks/wan-1.3b-720p.pt'''),
            _esa(
                "cached mode", "python", '''from esa.cached_processor import cached_processor_mode
from esa.processor import _make_step_callback
from esa.models import load_pipeline, generate_video

pipe = load_pipeline("wan-t2v-1.3b")

with cached_processor_mode(pipe, "masks/wan-1.3b-720p.pt", budget=0.5) as state:
    cb = _make_step_callback(state)
    video = generate_video(pipe, "A cat walking on grass", "wan-t2v-1.3b",
                           height=720, width=1280, callback_on_step_end=cb)'''),
            _esa(
                "calibrate, 480p", "shell", r'''# 480p (default resolution)
python scripts/calibrate.py --model wan-t2v-1.3b --num-prompts 5 \
    --budgets 0.7,0.5,0.3 --output masks/wan-1.3b.pt'''),
            _esa(
                "calibrate, 720p", "shell", r'''# 720p
python scripts/calibrate.py --model wan-t2v-1.3b --num-prompts 5 \
    --height 720 --width 1280 --budgets 0.5 --output masks/wan-1.3b-720p.pt''', slow=True),
            _esa("speed, online", "shell", '''# Online mode
python scripts/benchmark.py --model wan-t2v-1.3b --steps 5 --budgets 0.7,0.5,0.3'''),
            _esa(
                "speed, cached", "shell", r'''# Cached mode
python scripts/benchmark_cached.py --model wan-t2v-1.3b \
    --masks masks/wan-1.3b.pt --budgets 0.7,0.5,0.3 --steps 5'''),
            _esa(
                "generate, dense", "shell", r'''python scripts/generate.py --model wan-t2v-1.3b --method dense \
    --output-dir results/dense'''),
            _esa(
                "generate, sparse", "shell",
                r'''python scripts/generate.py --model wan-t2v-1.3b --method entropy --budget 0.5 \
    --output-dir results/sparse-0.5'''),
            _esa(
                "evaluate", "shell", r'''python scripts/evaluate.py \
    --reference results/dense \
    --generated results/sparse-0.5 \
    --output results/sparse-0.5/metrics.json'''),
            _esa(
                "experiment", "shell", r'''python experiments/run_experiment.py \
    --model wan-t2v-1.3b --height 720 --width 1280 --budget 0.5 \
    --tag 1.3b-720p-b05'''),
            _esa("launch all", "shell", '''# Or launch multiple experiments via srun
bash experiments/launch_all.sh''', slow=True), _esa("export", "shell", "python scripts/export_mp4.py results/dense"),
            _esa(
                "srun, one", "shell", r'''srun --gres=gpu:1 --job-name=esa-1.3b-720p \
    python experiments/run_experiment.py \
    --model wan-t2v-1.3b --height 720 --width 1280 --budget 0.5 \
    --tag 1.3b-720p-b05''', slow=True),
            _esa(
                "srun, several", "shell", r'''# Each srun grabs its own GPU — run these from the same shell
srun --gres=gpu:1 --job-name=esa-1.3b-720p-b07 \
    python experiments/run_experiment.py \
    --model wan-t2v-1.3b --height 720 --width 1280 --budget 0.7 \
    --tag 1.3b-720p-b07 > experiments/logs/1.3b-720p-b07.log 2>&1 &

srun --gres=gpu:1 --job-name=esa-14b-480p-b05 \
    python experiments/run_experiment.py \
    --model wan-t2v-14b --budget 0.5 --cpu-offload \
    --tag 14b-480p-b05 > experiments/logs/14b-480p-b05.log 2>&1 &''', slow=True),
            _esa("monitor", "shell", '''# Monitor
tail -f experiments/logs/*.log
squeue -u $USER''', slow=True), _esa("launch all, again", "shell", "bash experiments/launch_all.sh", slow=True),
            _esa(
                "batch script", "shell", r'''#!/bin/bash
#SBATCH --job-name=esa-experiment
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=6:00:00
#SBATCH --output=experiments/logs/%x-%j.log

python experiments/run_experiment.py \
    --model wan-t2v-1.3b --height 720 --width 1280 --budget 0.5 \
    --tag 1.3b-720p-b05''', slow=True),
            _esa(
                "submit", "shell", r'''for budget in 0.7 0.5 0.3; do
    sbatch --job-name=esa-b${budget} experiments/job.sbatch \
        --export=ALL,BUDGET=$budget
done''', slow=True),
            _mindie(
                "basic usage", '''from mindiesd import sparse_attention
out = sparse_attention(q, k, v, head_num=24, input_layout="BNSD", sparse_type="rf_v2", sparsity=0.8)''',
                needs='''import torch
q, k, v = (torch.randn(1, 24, 1024, 128) for _ in range(3))'''),
            _mindie(
                "image model", '''import torch
from mindiesd import sparse_attention
q = torch.randn(2, 24, 4096, 128, device="npu", dtype=torch.float16)
k = torch.randn(2, 24, 4096, 128, device="npu", dtype=torch.float16)
v = torch.randn(2, 24, 4096, 128, device="npu", dtype=torch.float16)
out = sparse_attention(q, k, v, head_num=24, input_layout="BNSD", sparse_type="rf_v2", sparsity=0.6)'''),
            _mindie(
                "video model", '''out = sparse_attention(
q, k, v,
head_num=24,
input_layout="BNSD",
sparse_type="rf_v2",
sparsity=0.8,
latent_shape_q=[t, h, w],
latent_shape_k=[t, h, w],
)''', needs='''import torch
from mindiesd import sparse_attention
t, h, w = 4, 16, 24
q, k, v = (torch.randn(1, 24, t * h * w, 128) for _ in range(3))'''),
            )
