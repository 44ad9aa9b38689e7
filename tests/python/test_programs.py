# SPDX-License-Identifier: Apache-2.0
"""The programs from calibration to the whole experiment, on wan-tiny and on mini CogVideoX and HunyuanVideo pipelines;
what strangers do wrong; resuming and sharing; and that the native engine makes the same video."""
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy
import pipelines
import pytest
from esa.core.config import EsaConfig
from esa.core.context import shared_context
from esa.core.library import EsaError
from esa.core.mask import MaskFile
from esa.core.media import Frames
from esa.core.plan import own_blocks
from esa.metrics import compare, psnr
from esa.programs import (
    benchmark,
    benchmark_cached,
    calibrate,
    evaluate,
    export_mp4,
    generate,
    native,
    program,
    prompts,
    run_experiment,
)
from esa.programs.native import find_command

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = {
    m.__name__.rpartition(".")[2]: m
    for m in (benchmark, benchmark_cached, calibrate, evaluate, export_mp4, generate, run_experiment)
}
TINY = str(ROOT / "models" / "wan-tiny")
SIZES = {"wan-tiny": ["--frames", "5", "--height", "64", "--width", "64", "--block", "64x64"],
         "cogvideox-5b": ["--frames", "5", "--height", "64", "--width", "96", "--block", "64x32"],
         "hunyuan-video": ["--frames", "5", "--height", "64", "--width", "96", "--block", "64x32"]}


def run(name, *arguments):
    """A program in this process; its exit status."""
    return program.run(name, PROGRAMS[name].main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    pipelines.make_cogvideox(str(root / "cogvideox-5b"))
    pipelines.make_hunyuan(str(root / "hunyuan-video"))
    (root / "wan-tiny").symlink_to(TINY)
    before = os.environ.get("ESA_MODELS")
    os.environ["ESA_MODELS"] = str(root)
    yield root
    os.environ.pop("ESA_MODELS") if before is None else os.environ.update(ESA_MODELS=before)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- all of them, in the order they are used

@pytest.mark.parametrize("model", list(SIZES))
def test_from_calibration_to_experiment(model, models, here, capfd):
    common = ["--model", model, *SIZES[model]]
    assert run("calibrate", *common, "--steps", 2, "--num-prompts", 2, "--budgets", "0.5", "--warmup-frac", 0,
               "--output", "masks/m.pt") == 0
    file = MaskFile("masks/m.pt")
    assert file.info.prompts == 2 and file.info.steps == 2 and file.model == model and file.info.config_hash.startswith(
        b"fnv1a64:")
    assert run("generate", *common, "--steps", 2, "--method", "dense", "--output-dir", "r/dense") == 0
    assert run("generate", *common, "--steps", 2, "--method", "cached", "--masks", "masks/m.pt", "--warmup-frac", 0,
               "--output-dir", "r/cached", "--json", "r/cached.json") == 0
    made = json.loads(pathlib.Path("r/cached.json").read_text())["videos"][0]
    assert made["sparse_calls"] > 0 and 0 < made["density"] < 1 and made["select_seconds"] < made["attention_seconds"]
    assert run("evaluate", "--reference", "r/dense", "--generated", "r/cached", "--output",
               "r/cached/metrics.json") == 0
    metrics = json.loads(pathlib.Path("r/cached/metrics.json").read_text())
    assert metrics["mean"]["psnr"] is not None and metrics["mean"]["psnr"] > 8 and len(
        metrics["videos"][0]["each"]["psnr"]) >= 5
    assert run("export_mp4", "r/dense") == 0
    assert Frames.read("r/dense/000.mp4").shape == Frames.read("r/dense/000.safetensors").shape
    # the MP4 beside a tensor does not disturb
    assert run("evaluate", "--reference", "r/dense", "--generated", "r/cached") == 0
    assert run("benchmark", *common, "--steps", 2, "--budgets", "0.6,0.3", "--json", "b.json") == 0
    assert run("benchmark_cached", *common, "--steps", 3, "--masks", "masks/m.pt", "--budgets", "0.5", "--warmup-frac",
               0, "--json", "c.json") == 0
    online, cached = (json.loads(pathlib.Path(name).read_text()) for name in ("b.json", "c.json"))
    assert [v["budget"] for v in online["variants"]] == [1.0, 0.6, 0.3] and all(v["speedup"] > 0
                                                                                for v in online["variants"][1:])
    assert len(cached["variants"][1]["records"][0]["step_seconds"]) == 3 and cached["variants"][1]["density"] < 1
    assert run("run_experiment", *common, "--steps", 2, "--tag", "t", "--num-prompts", 1, "--eval-prompts", 1,
               "--warmup-frac", 0.5) == 0
    said = capfd.readouterr().out
    assert "masks/m.pt: masks for budgets 0.5 from 2 prompts" in said and "b0.5" in said
    check_schema("results/t")
    assert not os.path.exists("results/t/work")
    before = {path: path.stat().st_mtime_ns for path in pathlib.Path("results/t").glob("*")}
    assert run("run_experiment", *common, "--steps", 2, "--tag", "t", "--num-prompts", 1, "--eval-prompts", 1,
               "--warmup-frac", 0.5) == 0
    assert "b0.5" in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in pathlib.Path("results/t").glob("*")} == before
    assert run("run_experiment", *common, "--steps", 3, "--tag", "t", "--num-prompts", 1, "--eval-prompts", 1,
               "--warmup-frac", 0.5) == 1
    assert "was begun with steps 2, but this command asks for 3" in capfd.readouterr().err


def check_schema(folder):
    """The files are those of the native command: held against its schemas, and read by it."""
    sys.path.insert(0, str(ROOT / "tests" / "cli"))
    try:
        import schemas
    finally:
        sys.path.pop(0)
    for name in ("config", "speed", "quality"):
        schemas.check(os.path.join(folder, f"{name}.json"), f"experiment-{name}")
    speed = json.loads(pathlib.Path(folder, "speed.json").read_text())
    assert [v["name"] for v in speed["variants"]] == ["dense", "b0.5"]
    for variant in speed["variants"]:
        for video in variant["videos"]:
            assert Frames.read(os.path.join(folder, video["file"])).shape[3] == 3
    done = subprocess.run([find_command(), "experiment", "collect", "--results", "results"], capture_output=True,
                          text=True)
    assert done.returncode == 0 and "b0.5" in done.stdout, done.stdout + done.stderr


def test_an_experiment_does_not_go_on_with_other_settings_or_weights(here, capfd):
    """Which weights a folder holds is told from their bytes, not from times."""
    os.makedirs("model/vae")
    weights = pathlib.Path("model/vae/a.safetensors")
    weights.write_bytes(bytes(5000))
    config = pathlib.Path("results/x/config.json")

    def begin(**changes):
        request = {"tag": "x", "command": "this test", "model": "model", "skip_calibrate": False,
                   "settings": {"steps": 2, "budgets": [0.5], "calibration_prompts": ["a cat"], **changes}}
        program.write_json("results/x/work/request.json", request)
        status = native.call("experiment", "begin", "results/x")
        assert not os.path.exists("results/x/work")
        return status, capfd.readouterr().err
    assert begin() == (0, "")
    written = json.loads(config.read_text())
    assert written["settings"]["weights_hash"].startswith("fnv1a64:") and written["machine"]["cores"] > 0
    os.utime(weights, (1, 1))
    assert begin() == (0, "") and json.loads(config.read_text()) == written
    status, said = begin(steps=3)
    assert status == 1 and "results/x" in said and "steps 2" in said and "3" in said
    weights.write_bytes(bytes(4999) + b"1")
    os.utime(weights, (1, 1))
    status, said = begin()
    assert status == 1 and "'results/x' was begun with other weights" in said
    # of an esa that did not write which weights it used
    del written["settings"]["weights_hash"]
    config.write_text(json.dumps(written))
    assert begin()[0] == 0


@pytest.mark.parametrize("given, words", [("{}", "needs tag, command, model and settings"), ("[", "request.json"),
                                          (None, "request.json")], ids=["empty", "not JSON", "missing"])
def test_a_wrong_request_is_refused(given, words, here, capfd):
    os.makedirs("x/work")
    if given is not None:
        pathlib.Path("x/work/request.json").write_text(given)
    assert native.call("experiment", "begin", "x") == 1
    said = capfd.readouterr().err
    assert words in said and len(said.strip().splitlines()) == 1 and not os.path.exists("x/config.json")


def test_finishing_without_videos_is_refused(here, capfd):
    os.makedirs("x/work")
    settings = {"model": "m", "config_hash": "", "frames": 5, "height": 64, "width": 64, "steps": 2,
                "methods": ["cached"], "budgets": [0.5], "evaluation_prompts": ["a cat"], "calibration_prompts": []}
    pathlib.Path("x/config.json").write_text(json.dumps({"format": 1, "tag": "x", "settings": settings}))
    pathlib.Path("x/work/calibration.json").write_text('{"seconds": null, "tokens": 128}')
    assert native.call("experiment", "finish", "x") == 1
    assert "work/clips/dense-000.json" in capfd.readouterr().err
    assert sorted(os.listdir("x")) == ["config.json", "work"]


@pytest.mark.parametrize("changes, words", [({"methods": ["fast"]}, "unknown method"), ({"budgets": []}, "budgets"),
                                            ({"evaluation_prompts": []}, "names no prompts"),
                                            ({"evaluation_prompts": [3]}, "prompt that is no text"),
                                            ({"model": None}, "not that of an experiment")])
def test_finishing_with_wrong_settings_is_refused(changes, words, here, capfd):
    os.makedirs("x/work")
    settings = {"model": "m", "config_hash": "", "methods": ["cached"], "budgets": [0.5], "evaluation_prompts": ["a"],
                **changes}
    pathlib.Path("x/config.json").write_text(json.dumps({"format": 1, "tag": "x", "settings": settings}))
    assert native.call("experiment", "finish", "x") == 1
    said = capfd.readouterr().err
    assert words in said and len(said.strip().splitlines()) == 1


def test_generate_by_error(models, here):
    """The method error brings its own order, tail and warm-up."""
    common = ["--model", "wan-tiny", *SIZES["wan-tiny"], "--steps", 2, "--method", "error", "--budget", 0.5, "--out",
              "v.safetensors", "--json", "v.json"]
    sparse = []
    for more in ([], ["--warmup-frac", 0.5], ["--tail", "pooled", "--order", "hilbert"]):
        assert run("generate", *common, *more) == 0
        made = json.loads(pathlib.Path("v.json").read_text())["videos"][0]
        assert 0.3 < made["density"] < 0.6
        sparse.append(made["sparse_calls"] / made["calls"])
    assert sparse == [1, 0.5, 1]


def test_generate_with_carry(models, here, capfd):
    """The words are those of `esa generate`, and so is the record."""
    common = ["--model", "wan-tiny", *SIZES["wan-tiny"], "--steps", 4, "--out", "v.safetensors", "--json", "v.json"]
    error = ["--method", "error", "--budget", 0.5]
    for words, steps, asked, kind in (([], 6, "auto", "e4m3"), (["--carry", 3], 4, "3", "e4m3"),
                                      (["--carry", "0,2", "--carry-format", "bf16"], 4, "0,2", "bf16")):
        assert run("generate", *common, "--steps", steps, *error, *words) == 0
        made = json.loads(pathlib.Path("v.json").read_text())["videos"][0]["carry"]
        assert (made["asked"], made["format"]) == (asked, kind)
        assert made["anchors"] == list(EsaConfig(carry=asked).anchors(steps)) and made["anchor_calls"] > 0
        assert made["age"] > 0 and len(made["step_age"]) == steps and made["bytes"] > 0 and made["host_bytes"] == 0
    for words in ((*error, "--carry", "off"), ("--method", "dense")):
        assert run("generate", *common, *words) == 0
        made = json.loads(pathlib.Path("v.json").read_text())["videos"][0]["carry"]
        assert made == {"asked": "off", "format": None, "anchors": [], "anchor_calls": 0, "carried_calls": 0,
                        "age": None, "step_age": [], "bytes": 0, "host_bytes": 0}
    for words, said in ((["--carry", "often"], "'often' is neither auto, off, a number of anchors, nor their steps"),
                        (["--carry", 6, "--method", "dense"], "--carry is for methods that skip blocks, not")):
        capfd.readouterr()
        try:
            status = run("generate", *common, *words)
        except SystemExit as stop:
            status = stop.code
        assert status == 2 and said in capfd.readouterr().err


def test_generate_with_a_work(models, here, capfd):
    """A work or a preset means the method error, as does the method without any amount; the JSON has no budget."""
    common = ["--model", "wan-tiny", "--frames", 9, "--height", 64, "--width", 64, "--steps", 2, "--json", "v.json",
              "--out"]

    def made(name, *more):
        assert run("generate", *common, name, *more) == 0
        found = json.loads(pathlib.Path("v.json").read_text())
        return found["method"], found["budget"], found["videos"][0]["attention_work"]
    method, budget, work = made("w.safetensors", "--work", 0.9)
    assert (method, budget, work["asked"]) == ("error", None, 0.9) and abs(work["realised"] - 0.9) < 0.05
    assert f"attention work {work['realised']:.3f} (asked 0.9)" in capfd.readouterr().out
    with pytest.warns(UserWarning, match="blocks are whole"):              # so short a clip spends more
        named = made("p.safetensors", "--preset", "balanced")
        assert named[:2] == ("error", None) and named[2]["asked"] == 0.44
        assert made("e.safetensors", "--method", "error") == named
    assert pathlib.Path("p.safetensors").read_bytes() == pathlib.Path("e.safetensors").read_bytes()
    method, budget, work = made("b.safetensors", "--budget", 0.4)
    assert (method, budget, work["asked"]) == ("entropy", 0.4, None) and 0 < work["realised"] <= 1
    assert made("d.safetensors", "--method", "dense") == ("dense", 1, {"asked": None, "realised": 1})


def test_calibrate_by_error(models, here, capfd):
    """Without --block the blocks are the library's own, and the estimate of the disk is made with them."""
    common = ["--model", "wan-tiny", "--frames", 9, "--height", 64, "--width", 64, "--steps", 2, "--num-prompts", 1,
              "--method", "error", "--work", "0.9"]
    assert run("calibrate", *common, "--shard", "0/1", "--output", "r") == 0
    told = re.search(r"(\d+) layers, (\d+) heads, (\d+) tokens: up to (\d+) MB", capfd.readouterr().out)
    layers, heads, tokens, megabytes = map(int, told.groups())
    # two recordings, of 16 bytes per block, layer, head and step, and 2 % for the masks of a work; whole megabytes
    size = 16 * layers * heads * 2 * (-(-tokens // 64)) ** 2
    assert megabytes == round(2.02 * size / 1e6) and size <= os.path.getsize("r") < 1.1 * size + 8192
    assert calibrate.recording_size(layers, 2, heads, tokens, (64, 64), 1, errors=True) == size
    assert run("calibrate", *common, "--output", "m") == 0
    info = MaskFile("m").info
    assert (info.block_q, info.block_k, info.nq) == (64, 64, -(-tokens // 64))


@pytest.mark.parametrize("selector, tokens, blocks", [
    ("error", 8192, (64, 64)), ("error", 8193, (128, 128)), ("entropy", 100, (256, 128)), ("rf_v2", 100, (128, 128))])
def test_blocks_of_the_library(selector, tokens, blocks):
    assert own_blocks(shared_context(), selector, tokens) == blocks


def test_calibrate_with_score_groups(models, here):
    """Blocks are the recommended ones for the length, groups those that were asked for."""
    import esa
    size = SIZES["wan-tiny"][:-2]           # without --block
    common = ["--model", "wan-tiny", *size, "--steps", 2, "--num-prompts", 1, "--method", "error", "--work", "0.9,0.8",
              "--exact-rows", 0]
    for name, more, groups in (("a", [], (2, 1)), ("b", ["--score-groups", "4x2"], (4, 2))):
        assert run("calibrate", *common, *more, "--output", name) == 0
        file = esa.MaskFile(name)
        assert (file.info.block_q, file.info.block_k, file.info.group_q, file.info.group_k) == (64, 64, *groups)
        assert file.budgets == [0.8, 0.9]


# ---------------------------------------------------------------- the native engine and diffusers

def test_engine_and_diffusers_make_the_same_video(models, here):
    """The same seed, masks and model: two implementations in float32. 50 dB asks for errors below one grey level."""
    size = ["--frames", "9", "--height", "64", "--width", "64", "--steps", "3", "--guidance", "3"]
    recorded = ["--block", "64x64", "--num-prompts", "1", "--budgets", "0.5", "--output"]
    assert run("calibrate", "--model", "wan-tiny", *size, *recorded, "m.safetensors") == 0
    rule = pipelines.sigmas_of_version()
    prompt = prompts.TINY[1]
    common = ["--prompt", prompt, "--seed", "7", *size]
    for method in (["--method", "cached", "--masks", "m.safetensors", "--budget", "0.5", "--tail",
                    "pooled"], ["--method", "dense"]):
        assert run("generate", "--model", "wan-tiny", *common, *method, "--out", "python.safetensors") == 0
        command = [str(find_command()), "generate", "--model", TINY, *common, *method, *rule, "--out", "engine/"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        same = psnr("engine", "python.safetensors")
        print(f"{method[1]}: {same:.1f} dB between engine and diffusers")
        assert same > 50
    # Masks recorded by the engine serve diffusers too; recorded in the order of this package they are the same masks.
    record = [str(find_command()), "calibrate", "--model", TINY, *size, *rule, *recorded]
    done = subprocess.run([*record, "e.safetensors", "--order", "raster"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert run("generate", "--model", "wan-tiny", *common, "--method", "cached", "--masks", "e.safetensors", "--out",
               "x.safetensors") == 0
    assert subprocess.run([*record, "h.safetensors"], capture_output=True).returncode == 0
    hilbert = [*common, "--method", "cached", "--masks", "h.safetensors", "--tail", "pooled"]
    assert run("generate", "--model", "wan-tiny", *hilbert, "--out", "hv.safetensors") == 0
    assert MaskFile("h.safetensors").info.layout.order == 3            # Hilbert
    assert subprocess.run([str(find_command()), "generate", "--model", TINY, *hilbert, *rule, "--out", "h-engine/"],
                          capture_output=True).returncode == 0
    same = psnr("h-engine", "hv.safetensors")
    print(f"cached in Hilbert order: {same:.1f} dB between engine and diffusers")
    assert same > 50
    ours, theirs = MaskFile("m.safetensors"), MaskFile("e.safetensors")
    assert ours.info.config_hash == theirs.info.config_hash and ours.model == theirs.model
    alike = [(ours.mask(layer, 2, budget=0.5).blocks() == theirs.mask(layer, 2, budget=0.5).blocks()).mean()
             for layer in range(1, 8)]
    assert min(alike) > 0.97            # importances differ by rounding; blocks near the threshold may change places


# ---------------------------------------------------------------- resuming and sharing

def calibration(output, *more):
    return [
        "--model", "wan-tiny", *SIZES["wan-tiny"], "--steps", 2, "--num-prompts", 3, "--budgets", "0.5", "--output",
        output, *more
    ]


def test_calibration_resumes_and_shards_merge(models, here, monkeypatch, capsys):
    assert run("calibrate", *calibration("whole.pt")) == 0
    # Killed after the first prompt was written, and again in the middle of writing the note of the second.
    real, saved = calibrate.Checkpoint.save, []

    def save(self, handle, done):
        saved.append(done)
        if len(saved) == 2:
            handle.save_recording(f"{self.output}.{done}.recording")
            raise KeyboardInterrupt
        real(self, handle, done)
    monkeypatch.setattr(calibrate.Checkpoint, "save", save)
    assert run("calibrate", *calibration("resumed.pt")) == 130
    assert not os.path.exists("resumed.pt")
    monkeypatch.setattr(calibrate.Checkpoint, "save", real)
    assert run("calibrate", *calibration("resumed.pt", "--seed", 1)) == 1
    assert "other settings" in capsys.readouterr().err
    assert run("calibrate", *calibration("resumed.pt")) == 0
    assert "1 of 3 prompts are recorded already" in capsys.readouterr().out
    whole = pathlib.Path("whole.pt").read_bytes()
    assert pathlib.Path("resumed.pt").read_bytes() == whole
    for i in range(2):
        assert run("calibrate", *calibration(f"shard{i}", "--shard", f"{i}/2")) == 0
    merge = [find_command(), "masks", "merge", "shard0", "shard1", "--budgets", "0.5", "--out", "merged.pt"]
    done = subprocess.run(merge, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert pathlib.Path("merged.pt").read_bytes() == whole
    assert sorted(os.listdir(".")) == ["merged.pt", "resumed.pt", "shard0", "shard1", "whole.pt"]


@pytest.mark.slow
def test_several_processes(models, here):
    """--gpus 2 on the CPU, as a user starts it: calibration by prompts gives the same bytes, generation by heads the
    same video."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "python"))

    def python(*arguments):
        done = subprocess.run([sys.executable, "-m", *map(str, arguments)], env=environment, capture_output=True,
                              text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    python("esa.calibrate", *calibration("one.pt"))
    python("esa.calibrate", *calibration("two.pt", "--gpus", 2, "--device", "cpu"))
    assert pathlib.Path("one.pt").read_bytes() == pathlib.Path("two.pt").read_bytes()
    assert sorted(os.listdir(".")) == ["one.pt", "two.pt"]
    common = [
        "--model", "wan-tiny", *SIZES["wan-tiny"][:6], "--steps", 2, "--method", "cached", "--masks", "one.pt",
        "--budget", "0.5"
    ]
    python("esa.generate", *common, "--out", "one.safetensors")
    python("esa.generate", *common, "--gpus", 2, "--device", "cpu", "--out", "two.safetensors")
    assert psnr("one.safetensors", "two.safetensors") > 60          # rounding, below one grey level


# ---------------------------------------------------------------- what strangers do

@pytest.mark.parametrize("name, arguments, status, words", [
    ("calibrate", [], 2, "--output"),
    ("calibrate", ["--output", "x", "--budgets", "1.5"], 2, "1.5 is not between 0 and 1"),
    ("calibrate", ["--output", "x", "--budgets", "0.5,0.5"], 2, "names a budget twice"),
    ("calibrate", ["--output", "x", "--shard", "3/2"], 2, "--shard 3/2"),
    ("calibrate", ["--output", "x", "--score-groups", "8x4"], 2, "go with --method error"),
    ("calibrate", ["--output", "x", "--method", "error", "--score-groups", "8x5"], 2, "'8x5' is not two of 1, 2, 4"),
    ("calibrate", ["--output", "x", "--num-prompt", "3"], 2, "unrecognized arguments: --num-prompt"),
    ("calibrate", ["--output", "x", "--model", "wan-t2v-1,3b"], 1,
     "there is no folder 'wan-t2v-1,3b', and it is not one of the models"),
    ("calibrate", ["--output", "x", "--model", "wan-t2v-14b"], 1, "hf download"),
    ("calibrate", ["--output", "x", "--prompts", "missing.txt"], 1, "missing.txt"),
    ("calibrate", ["--output", "x", "--gpus", "0"], 2, "0 is not between 1 and 64"),
    ("generate", ["--method", "dense"], 2, "--output-dir"),
    ("generate", ["--method", "cached", "--output-dir", "x"], 2, "--masks"),
    ("generate", ["--method", "cached", "--masks", "no.pt", "--output-dir", "x"], 1, "'no.pt' does not exist"),
    ("generate", ["--method", "fast", "--output-dir", "x"], 2, "invalid choice"),
    ("generate", ["--order", "adaptive", "--output-dir", "x"], 1, "order 'adaptive' is for selector 'error'"),
    ("generate", ["--prompt", "a", "--num-prompts", "2", "--output-dir", "x"], 2, "three ways to say one thing"),
    ("generate", ["--num-prompts", "2", "--out", "x.mp4"], 2, "need --output-dir"),
    ("generate", ["--work", "0.5", "--budget", "0.5", "--output-dir", "x"], 2, "--budget and --work say the same"),
    ("generate", ["--work", "0.5", "--preset", "fast", "--output-dir", "x"], 2, "--work and --preset say the same"),
    ("generate", ["--preset", "fast", "--method", "dense", "--output-dir", "x"], 2, "not for dense"),
    ("generate", ["--block", "100x100", "--output-dir", "x"], 2, "multiples of 16"),
    ("benchmark", ["--budgets", "half"], 2, "'half' is not a number"),
    ("benchmark_cached", ["--masks", "no.pt"], 1, "python -m esa.calibrate makes one"),
    ("evaluate", ["--reference", "a"], 2, "--generated"),
    ("evaluate", ["--reference", "a", "--generated", "b"], 1, "'a'"),
    ("export_mp4", [], 2, "no video was given"),
    ("export_mp4", ["nothing"], 1, "'nothing'"),
    ("run_experiment", ["--model", "wan-tiny"], 2, "--tag"),
    ("run_experiment", ["--tag", "../x"], 2, "letters, digits"),
    ("run_experiment", ["--tag", "x", "--masks", "no.pt"], 1, "'no.pt' does not exist"),
])
def test_one_message(name, arguments, status, words, models, here, capfd, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(here / "hub"))
    try:
        got = run(name, *arguments)
    except SystemExit as end:
        got = end.code
    said = capfd.readouterr()
    assert got == status and words in said.err, (got, said.err)
    assert "Traceback" not in said.err and len(said.err.strip().splitlines()) == 1
    assert not list(here.glob("**/*.tmp")) and not (here / "x").is_file()


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("evaluate", "export_mp4")])
def test_help(name, capsys):
    with pytest.raises(SystemExit) as end:
        run(name, "--help")
    said = capsys.readouterr().out
    assert end.value.code == 0 and said.startswith(f"usage: python -m esa.{name}")
    assert all(option in said for option in ("--model", "--cpu-offload", "--gpus"))


@pytest.mark.parametrize("name, command", [("evaluate", "evaluate"), ("export_mp4", "export")])
def test_help_of_the_native_command(name, command, capfd):
    assert run(name, "--help") == 0
    assert f"esa {command}" in capfd.readouterr().out


def test_a_wrong_mask_file_is_refused(models, here, capsys):
    common = ["--model", "wan-tiny", *SIZES["wan-tiny"], "--steps", 2]
    assert run("calibrate", *common, "--num-prompts", 1, "--budgets", "0.5", "--output", "m.pt") == 0
    assert run("generate", *common, "--method", "cached", "--masks", "m.pt", "--height", 96, "--output-dir", "r") == 1
    assert "was made for" in capsys.readouterr().err
    assert run("generate", *common, "--method", "cached", "--masks", "m.pt", "--steps", 5, "--output-dir", "r") == 1
    assert "2 steps" in capsys.readouterr().err
    assert run("generate", *common, "--method", "cached", "--masks", "m.pt", "--steps", 5, "--step-map", "nearest",
               "--output-dir", "r") == 0
    pathlib.Path("junk.pt").write_bytes(b"not a mask file")
    assert run("generate", *common, "--method", "cached", "--masks", "junk.pt", "--output-dir", "r") == 1
    assert "junk.pt" in capsys.readouterr().err


# ---------------------------------------------------------------- videos and metrics

def test_videos_round_trip_and_compare(here):
    rng = numpy.random.default_rng(3)
    video = rng.integers(0, 256, (3, 24, 32, 3), dtype=numpy.uint8)
    other = numpy.clip(video.astype(int) + rng.integers(-3, 4, video.shape), 0, 255).astype(numpy.uint8)
    frames = Frames.of(video, fps=12)
    for name in ("a.safetensors", "a.npy", "frames/"):
        frames.save(name)
        assert (Frames.read(name.rstrip("/")).array() == video).all()
    assert Frames.read("a.safetensors").fps == 12
    both = compare(video, other)
    expected = 10 * numpy.log10(255 ** 2 / numpy.mean((video.astype(float) - other) ** 2))
    assert abs(both.psnr - expected) < 1e-6 and len(both.each) == 3 and both.lpips != both.lpips and both.flicker > 0
    with pytest.raises(ValueError, match="uint8"):
        Frames.of(video.astype(float))


def test_videos_name_no_other_file(here):
    """A file that refers to another one is refused, although that one can be read."""
    Frames.of(numpy.zeros((2, 16, 16, 3), numpy.uint8)).save("secret.mp4")
    for text in ("ffconcat version 1.0\nfile secret.mp4\n",
                 "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:1,\nsecret.mp4\n#EXT-X-ENDLIST\n"):
        pathlib.Path("leak.mp4").write_text(text)
        with pytest.raises(EsaError, match="leak.mp4"):
            Frames.read("leak.mp4")
    assert Frames.read("secret.mp4").shape == (2, 16, 16, 3)


def test_pairs(here, capfd):
    video = numpy.zeros((2, 16, 16, 3), numpy.uint8)
    for name in ("a/000.safetensors", "a/001.npy", "b/000.safetensors", "b/000.mp4", "b/001.npy", "b/metrics.json"):
        path = pathlib.Path(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}") if path.suffix == ".json" else Frames.of(video).save(path)
    assert run("evaluate", "--reference", "a", "--generated", "b", "--output", "b/metrics.json") == 0
    measured = json.loads(pathlib.Path("b/metrics.json").read_text())["videos"]
    assert [(v["name"], os.path.basename(v["generated"])) for v in measured] == [("000", "000.safetensors"),
                                                                                 ("001", "001.npy")]
    os.remove("b/001.npy")
    capfd.readouterr()
    assert run("evaluate", "--reference", "a", "--generated", "b") == 1
    said = capfd.readouterr().err
    assert "001" in said and "b" in said and len(said.strip().splitlines()) == 1


def test_prompts_are_those_of_the_command():
    """The build puts the package's files into the command, which counts on their number."""
    count = int(re.search(r"#define CLI_PROMPTS (\d+)", (ROOT / "cli" / "clip" / "video.h").read_text())[1])
    command = pathlib.Path(str(find_command())).read_bytes()
    for ours in (prompts.TINY, prompts.LARGE):
        assert len(set(ours)) == len(ours) == count == prompts.BUILT_IN
        assert all(f"\n{prompt}\n".encode() in command for prompt in ours)
