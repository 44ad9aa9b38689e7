#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Asks `esa serve` for a video and saves it.

    esa serve &
    python3 examples/serve_client.py "a red ball rolls to the right over a blue floor" --esa preset=fast

The calls are those of the package `openai`, if it is installed and has them. Otherwise the program speaks HTTP itself,
and shows the progress of every step. A server with a key reads it from the environment variable ESA_API_KEY."""
import argparse
import json
import mimetypes
import os
import sys
import urllib.error
import urllib.request
import uuid
import warnings

try:
    import openai
    HAS_OPENAI = hasattr(openai.OpenAI, "videos")
    FAILURES: tuple = (OSError, RuntimeError, openai.OpenAIError)
    # the package says so at every call; it is about OpenAI's own service
    warnings.filterwarnings("ignore", "The Sora API", DeprecationWarning)
except ImportError:
    HAS_OPENAI = False
    FAILURES = (OSError, RuntimeError)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens (%(default)s)")
    parser.add_argument("--out", default="video.mp4", help="the file to write (%(default)s)")
    parser.add_argument("--model", help="a model of the server (its first)")
    parser.add_argument("--size", help="WIDTHxHEIGHT in pixels (the model's own)")
    parser.add_argument("--seconds", help="length, a whole number (the model's own)")
    parser.add_argument("--picture", help="a PNG or JPEG to begin with, for models that take one (none)")
    parser.add_argument("--field", action="append", default=[], metavar="NAME=VALUE",
                        help="another field of the request, such as seed=3 or num_inference_steps=20")
    parser.add_argument("--esa", action="append", default=[], metavar="NAME=VALUE",
                        help="an option of `esa generate`, such as preset=fast or carry=off")
    parser.add_argument("--http", action="store_true", help="do not use the package openai")
    return parser.parse_args()


def fields(args):
    """The request's text fields."""
    given = {"prompt": args.prompt, "model": args.model, "size": args.size, "seconds": args.seconds}
    given.update(pair.split("=", 1) for pair in args.field)
    given.update(("esa." + name, value) for name, value in (pair.split("=", 1) for pair in args.esa))
    return {name: value for name, value in given.items() if value is not None}


# ---------------------------------------------------------------- with the package


def with_openai(args, key):
    client = openai.OpenAI(base_url=args.url + "/v1", api_key=key or "none", max_retries=0)
    given = fields(args)
    known = {name: given.pop(name) for name in ("prompt", "model", "size", "seconds") if name in given}
    if args.picture:
        with open(args.picture, "rb") as file:
            known["input_reference"] = (os.path.basename(args.picture), file.read())
    job = client.videos.create(**known, extra_body=given)
    print(f"{job.id}: {job.status}")
    job = client.videos.poll(job.id)
    if job.status != "completed":
        raise RuntimeError(job.error.message if job.error else f"the video is {job.status}")
    client.videos.download_content(job.id).write_to_file(args.out)


# ---------------------------------------------------------------- without


def call(args, key, path, body=None, kind=None):
    headers = {"Authorization": "Bearer " + key} if key else {}
    if kind:
        headers["Content-Type"] = kind
    try:
        return urllib.request.urlopen(urllib.request.Request(args.url + path, body, headers))
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["error"]["message"]) from error


def form(given, picture):
    """A multipart body, and its content type."""
    edge = uuid.uuid4().hex
    parts = [f'--{edge}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
             for name, value in given.items()]
    if picture:
        kind = mimetypes.guess_type(picture)[0] or "application/octet-stream"
        with open(picture, "rb") as file:
            parts.append(f'--{edge}\r\nContent-Disposition: form-data; name="input_reference"; filename="picture"\r\n'
                         f"Content-Type: {kind}\r\n\r\n".encode() + file.read() + b"\r\n")
    return b"".join(parts) + f"--{edge}--\r\n".encode(), "multipart/form-data; boundary=" + edge


def events(stream):
    """Names and data of server-sent events."""
    name = ""
    for line in stream:
        text = line.decode().rstrip("\r\n")
        if text.startswith("event: "):
            name = text[7:]
        elif text.startswith("data: "):
            yield name, json.loads(text[6:])


def with_http(args, key):
    job = json.load(call(args, key, "/v1/videos", *form(fields(args), args.picture)))
    print(f"{job['id']}: {job['status']}")
    for name, data in events(call(args, key, f"/v1/videos/{job['id']}/events")):
        if name == "job":
            job = data
        elif name == "progress":
            left = data.get("seconds_left")
            print(f"{data['progress']:3d} %  {data['stage']} {data['step']}/{data['steps']}"
                  + (f", {left:.0f} s left" if left is not None else ""))
    if job["status"] != "completed":
        raise RuntimeError(job["error"]["message"] if job["error"] else f"the video is {job['status']}")
    with call(args, key, f"/v1/videos/{job['id']}/content") as answer, open(args.out, "wb") as file:
        while block := answer.read(1 << 20):
            file.write(block)


def main():
    args = arguments()
    key = os.environ.get("ESA_API_KEY")
    try:
        (with_openai if HAS_OPENAI and not args.http else with_http)(args, key)
    except FAILURES as error:
        sys.exit(f"serve_client: {error}")
    print(args.out)


if __name__ == "__main__":
    main()
