# SPDX-License-Identifier: Apache-2.0
"""`esa serve` as a process of a test. Standard library only.

    with server.Server(ESA, "--model", folder, folder=self.dir) as s:
        status, answer = s.call("POST", "/v1/videos", {"prompt": "..."})
        job = s.finished(answer["id"])
"""
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request

# Seconds: a job of the tests, on a machine that others use too.
LONG = 300


class Server:
    """Runs from construction to stop(). url ends without a slash; log: what it wrote on stderr."""

    def __init__(self, esa, *words, folder, port=0, env=None):
        self.words = [esa, "serve", "--port", str(port), "--output-dir", os.path.join(folder, "videos"),
                      *map(str, words)]
        self.key = None
        self.err = open(os.path.join(folder, "serve.log"), "ab")
        self.started = time.monotonic()
        self.process = subprocess.Popen(self.words, stdout=subprocess.PIPE, stderr=self.err, text=True,
                                        env={**os.environ, **(env or {})})
        first = self.process.stdout.readline()
        found = re.fullmatch(r"esa serve: (http://\S+?)/?\n", first)
        if not found:
            self.stop()
            raise AssertionError(f"the first line is {first!r}: {self.log()}")
        self.url = found[1]
        self.port = int(self.url.rsplit(":", 1)[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def log(self):
        with open(self.err.name, encoding="utf-8", errors="replace") as file:
            return file.read()

    def stop(self, number=signal.SIGTERM, seconds=60):
        """The exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self.err.close()
        self.process.stdout.close()
        return status

    def raw(self, method, path, body=None, headers=()):
        """Status, headers, bytes."""
        headers = dict(headers)
        if self.key:
            headers.setdefault("Authorization", "Bearer " + self.key)
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers.setdefault("Content-Type", "application/json")
        request = urllib.request.Request(self.url + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=LONG) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read()

    def call(self, method, path, body=None, headers=()):
        """Status, and the answer's JSON."""
        status, _, data = self.raw(method, path, body, headers)
        return status, json.loads(data)

    def finished(self, name, seconds=LONG):
        """The job once it has ended."""
        until = time.monotonic() + seconds
        while True:
            status, job = self.call("GET", "/v1/videos/" + name)
            if status != 200 or job["status"] in ("completed", "failed"):
                return job
            if time.monotonic() > until:
                raise AssertionError(f"the job has not ended: {job}")
            time.sleep(0.05)
