#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Microseconds that each host layer adds to a bare esa_session_attention call.

    bench/hosts.py                                  what needs no host: the package, ComfyUI, LightX2V
    PYTHONPATH=omni:sglang bench/hosts.py           also vLLM-Omni and SGLang, from unpacked wheels
    bench/hosts.py --device cuda --json hosts.json

Unpack wheels with `pip download --no-deps vllm-omni==0.30.0 sglang==0.5.23` and `unzip`. Their other dependencies are
replaced by stand-ins if they are missing (tests/python/hosts). A host that is not there is skipped with a message.

Every row times its layer and the bare call in turn, on the same session and tensors, so that the arithmetic cancels.
"queued" is the time until the calls have returned, "done" until the device has finished; overhead is the difference of
"queued". The tensors are small: what is measured is the way to the kernel."""
import argparse
import ctypes as C
import importlib.util
import json
import pathlib
import statistics
import sys
import time
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "python" / "hosts")]
import torch  # noqa: E402

import esa  # noqa: E402
from esa.core import tensor as X  # noqa: E402
from esa.hosts.run import HostRun, config_of  # noqa: E402

LAYERS, STEPS = 8, 16
OPTIONS = {"selector": "entropy", "budget": 0.5, "warmup_frac": 0.0, "dense_first_layer": False, "refresh_every": 0,
           "order": "raster", "min_tokens": 1}
# What hosts import and attention does not need.
MISSING = ("diffusers", "transformers", "huggingface_hub", "einops", "PIL", "safetensors", "accelerate", "psutil",
           "requests", "yaml", "pydantic", "cv2", "imageio", "av", "soundfile", "scipy", "cache_dit", "tqdm")


class Bench:
    def __init__(self, device, rounds):
        self.device, self.rounds, self.rows = torch.device(device), rounds, []
        gpu = self.device.type == "cuda"
        self.grid, self.heads, dim = ((4, 16, 16), 2, 128) if gpu else ((2, 8, 16), 1, 16)
        self.tokens, self.block = self.grid[0] * self.grid[1] * self.grid[2], 128 if gpu else 16
        self.options = {**OPTIONS, "block": self.block}
        r = torch.Generator().manual_seed(0)
        self.qkv = tuple(torch.randn(1, self.tokens, self.heads, dim, generator=r).to(
            self.device, torch.bfloat16 if gpu else torch.float32) for _ in range(3))

    def sync(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def once(self, video):
        """Microseconds per call (queued, done) of one video."""
        self.sync()
        start = time.perf_counter()
        video()
        queued = time.perf_counter()
        self.sync()
        scale = 1e6 / (LAYERS * STEPS)
        return (queued - start) * scale, (time.perf_counter() - start) * scale

    def compare(self, name, video, bare):
        """A row: the host's video and the bare one in turn."""
        with torch.no_grad():
            for _ in range(2):
                video(), bare()
            times = [(self.once(video), self.once(bare)) for _ in range(self.rounds)]
        host, base = ([statistics.median(t[i][k] for t in times) for k in range(2)] for i in range(2))
        overhead = statistics.median(a[0] - b[0] for a, b in times)
        self.rows.append({"layer": name, "queued": host[0], "done": host[1], "bare_queued": base[0],
                          "bare_done": base[1], "overhead": overhead})
        print("| " + " | ".join((name, *(f"{x:.1f}" for x in (*host, *base, overhead)))) + " |", flush=True)

    def skip(self, name, why):
        self.rows.append({"layer": name, "skipped": why})
        print(f"{name} was not measured: {why}", flush=True)

    def bare(self, session, out=None):
        """The C calls of one video on a session, with views made ahead."""
        q, k, v = self.qkv
        out = torch.empty_like(q) if out is None else out
        views = [X.view(x, "BSND", name) for x, name in ((q, "q"), (k, "k"), (v, "v"), (out, "out"))]
        pointers, c, ptr = [C.byref(x) for x in views], session._context.lib.c, session._ptr

        def video():
            c.esa_session_begin(ptr)
            for step in range(STEPS):
                c.esa_session_step(ptr, step, 0)
                for layer in range(LAYERS):
                    c.esa_session_attention(ptr, layer, 0, *pointers, None)
        video.keep = (views, out)
        return video

    def run(self, name, run_of, call):
        """A host whose HostRun is known after the first call: call(step, layer) is one attention."""
        def video():
            for step in range(STEPS):
                for layer in range(LAYERS):
                    call(step, layer)
        with torch.no_grad():
            video()
        run = run_of()
        assert run.stats().fallback_calls == 0 and run.stats().sparse_calls == LAYERS * STEPS, run.stats()
        self.compare(name, video, self.bare(run.session))


def package(bench):
    session = esa.Session(config_of(bench.options, ""), layers=LAYERS, steps=STEPS, branches=4,
                          layout=esa.Layout(grid=bench.grid), device=bench.device)
    q, k, v = bench.qkv

    def video():
        session.begin()
        for step in range(STEPS):
            session.step(step)
            for layer in range(LAYERS):
                session.attention(layer, q, k, v, input_layout="BSND")
    bench.compare("esa.Session", video, bench.bare(session))
    run, layout = HostRun(config_of(bench.options, ""), LAYERS), esa.Layout(grid=bench.grid)
    bench.run("esa.hosts.run.HostRun", lambda: run,
              lambda step, layer: run.attention(layer, q, k, v, layout=layout, step=step, steps=STEPS))


def comfyui(bench):
    from esa.hosts import comfyui as ours
    model = types.SimpleNamespace(blocks=[None] * LAYERS, patch_size=(1, 2, 2))
    patch = ours.Patch(config_of(bench.options, ""), model, 1.0, 0.0, (), 1)
    override, q, k, v = ours.make_override(patch, None), *(x.flatten(2) for x in bench.qkv)
    sigmas = torch.linspace(1, 0, STEPS + 1).to(bench.device)
    steps = [sigmas[i:i + 1] for i in range(STEPS)]
    options = {"grid_sizes": bench.grid, "block_type": "double", "sample_sigmas": sigmas, "uuids": ["one"]}

    def call(step, layer):
        options.update(sigmas=steps[step], block_index=layer)
        return override(None, q, k, v, bench.heads, transformer_options=options)
    bench.run("ComfyUI override", lambda: patch.run, call)


def found(name):
    """The folder on the path that holds a package."""
    spec = importlib.util.find_spec(name)
    return None if spec is None else pathlib.Path(list(spec.submodule_search_locations)[0]).parent


def vllm_omni(bench):
    folder = found("vllm_omni")
    if folder is None:
        return bench.skip("vLLM-Omni", "no vllm_omni on PYTHONPATH")
    import omni_host
    omni_host.prepare(folder, *MISSING)
    from esa.hosts import vllm_omni as ours
    from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata, VideoTokenLayout
    from vllm_omni.diffusion.attention.layer import Attention
    from vllm_omni.diffusion.config import set_current_diffusion_config
    from vllm_omni.diffusion.data import parse_attention_config
    from vllm_omni.diffusion.forward_context import get_forward_context, set_forward_context
    ours.register()
    settings = types.SimpleNamespace(
        diffusion_attention_config=parse_attention_config(
            {"default": {"backend": "RAINFUSION_ATTN", "skip_calibration": {"esa": bench.options}}}),
        parallel_config=types.SimpleNamespace(ring_degree=1, ulysses_degree=1, allgather_degree=1,
                                              sequence_parallel_size=1), model_class_name=None)
    q, k, v = bench.qkv
    with set_current_diffusion_config(settings), set_forward_context(omni_diffusion_config=settings):
        layers = [Attention(num_heads=bench.heads, head_size=q.shape[-1], causal=False, softmax_scale=q.shape[-1]**-0.5,
                            qkv_layout="BSND", prefix=f"blocks.{i}.attn1") for i in range(LAYERS)]
        metadata = AttentionMetadata(video_layout=VideoTokenLayout(prefix_len=0, latent_grid=bench.grid,
                                                                   used_len=bench.tokens))
        context, impl = get_forward_context(), layers[0].attention

        def call(step, layer, through=None):
            context.denoise_step_idx = step
            return (layers[layer] if through is None else through[layer])(q, k, v, metadata)
        backends = [layer.attention.forward_cuda for layer in layers]
        run_of = lambda: impl.model.run(impl.config)  # noqa: E731
        bench.run("vLLM-Omni backend", run_of, lambda step, layer: call(step, layer, backends))
        bench.run("vLLM-Omni attention layer", run_of, call)
    return None


def sglang(bench):
    folder = found("sglang")
    if folder is None:
        return bench.skip("SGLang", "no sglang on PYTHONPATH")
    import sglang_host
    args = sglang_host.prepare(folder, *MISSING)
    args.attention_backend_config["esa"] = bench.options
    from esa.hosts import sglang as ours
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
    q, k, v = bench.qkv
    layers = [ours.EsaImpl(bench.heads, q.shape[-1], q.shape[-1]**-0.5, prefix=f"blocks.{i}") for i in range(LAYERS)]
    build = ours.EsaBackend.get_builder_cls()().build
    t, h, w = bench.grid
    metadata = [build(step, raw_latent_shape=(1, 16, t, 2 * h, 2 * w), patch_size=(1, 2, 2)) for step in range(STEPS)]
    with set_forward_context(0, metadata[0], types.SimpleNamespace(num_inference_steps=STEPS)):
        bench.run("SGLang backend", lambda: layers[0].model.run(layers[0].own),
                  lambda step, layer: layers[layer].forward(q, k, v, metadata[step]))
    return None


def lightx2v(bench):
    """The operator has no session: its bare call is esa_attention with the same mask."""
    if found("lightx2v") is None:
        registry = types.ModuleType("lightx2v.utils.registry_factory")

        class Register(dict):
            def __call__(self, name):
                return lambda part: self.setdefault(name, part)
        registry.SPARSE_OPERATOR_REGISTER, registry.SPARSE_MASK_GENERATOR_REGISTER = Register(), Register()
        registry.ATTN_WEIGHT_REGISTER = Register()
        template = types.ModuleType("lightx2v.common.ops.attn.template")
        template.AttnWeightTemplate = object
        for name in ("lightx2v", "lightx2v.utils", "lightx2v.common", "lightx2v.common.ops",
                     "lightx2v.common.ops.attn"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules[registry.__name__], sys.modules[template.__name__] = registry, template
    from esa.core.functional import attention_params, context_of
    from esa.hosts import lightx2v as ours
    q, k, v = (x[0] for x in bench.qkv)
    operator = ours.EsaOperator(bench.block, bench.block)
    mask = ours.EsaMaskGenerator(bench.block, bench.block, {"esa": {"budget": 0.5}})(q, k)
    context, params = context_of(q), attention_params("none", None, False)
    out = torch.empty_like(bench.qkv[0])
    views = [X.view(x, "BSND", "x") for x in (*bench.qkv, out)]
    pointers, c = [C.byref(x) for x in views], context.lib.c

    def bare():
        for _ in range(LAYERS * STEPS):
            c.esa_attention(context.ptr, *pointers, mask.mask.ptr, C.byref(params))

    def video():
        for _ in range(LAYERS * STEPS):
            operator(q, k, v, mask)
    bench.compare("LightX2V operator (bare: esa_attention)", video, bare)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    given = parser.parse_args()
    bench = Bench(given.device, given.rounds)
    print(f"esa {esa.__version__}, torch {torch.__version__}, {given.device}, {bench.tokens} tokens, {bench.heads} "
          "heads; microseconds per call, medians\n")
    print("| layer | queued | done | bare queued | bare done | overhead |\n|---|---|---|---|---|---|")
    for host in (package, comfyui, lightx2v, vllm_omni, sglang):
        try:
            host(bench)
        except ImportError as error:
            bench.skip(host.__name__, str(error))
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps({"device": given.device, "rows": bench.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
