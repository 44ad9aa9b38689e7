# SPDX-License-Identifier: Apache-2.0
"""A running `esa serve` for the checks of the server: starting, asking, waiting, stopping. Standard library only."""
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import unittest
import urllib.parse

import kit

# The smallest video: one frame, one step; and one whose steps take seconds, to be stopped.
TINY = {"prompt": "a red ball", "num_frames": 1, "size": "16x16", "num_inference_steps": 1,
        "esa": {"block": "16x16", "preset": "faithful"}}
SMALL = {"prompt": "a red ball", "num_frames": 9, "size": "64x64", "num_inference_steps": 4}
LONG = {"prompt": "a red ball", "num_frames": 33, "size": "128x128", "num_inference_steps": 100}
PATIENCE = 240                       # seconds until something that must happen counts as lost; machines may be busy


class Answer:
    def __init__(self, response):
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self):
        return json.loads(self.body)


class Server:
    """A server in a process of its own; `with` stops it."""

    def __init__(self, esa, folder, *options, port=0, env=None):
        self.folder = str(folder)
        self.log = tempfile.TemporaryFile()
        words = [esa, "serve", "--port", str(port), "--output-dir", self.folder, *map(str, options)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=self.log, env=env, text=True)
        line = self.process.stdout.readline()
        found = re.match(r"esa serve: http://(.*):(\d+)/\n", line)
        if not found:
            self.process.wait(timeout=60)
            raise RuntimeError(f"the server did not start: {line!r} {self.said()}")
        self.host, self.port = found[1].strip("[]"), int(found[2])
        self.url = f"http://{found[1]}:{self.port}"
        self.key = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def said(self):
        """What it has written to stderr."""
        if not self.log.closed:
            self.log.seek(0)
            self.text = self.log.read().decode()
        return self.text

    def stop(self, how=signal.SIGTERM):
        """Ends the process; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        elif self.log.closed:
            return self.process.returncode
        status = self.process.wait(timeout=PATIENCE)
        self.process.stdout.close()
        self.said()
        self.log.close()
        return status

    def memory(self):
        """Resident bytes."""
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def connect(self, timeout=PATIENCE):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(self, method, path, body=None, headers=None, connection=None):
        """An answer. body: bytes, or what becomes JSON."""
        headers = dict(headers or {})
        if self.key and "Authorization" not in headers:
            headers["Authorization"] = f"Bearer {self.key}"
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers.setdefault("Content-Type", "application/json")
        own = connection or self.connect()
        try:
            own.request(method, path, body, headers)
            return Answer(own.getresponse())
        finally:
            if not connection:
                own.close()

    def get(self, path, **headers):
        return self.ask("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def make(self, **fields):
        """A new job; its id."""
        answer = self.ask("POST", "/v1/videos", fields)
        if answer.status != 200:
            raise AssertionError(f"{answer.status}: {answer.body.decode()}")
        return answer.json["id"]

    def job(self, name):
        return self.get(f"/v1/videos/{name}").json

    def wait(self, name, until=("completed", "failed")):
        """The job, when its status is one of these."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            job = self.job(name)
            if job.get("status") in until:
                return job
            time.sleep(0.05)
        raise AssertionError(f"{name} is {job.get('status')}, not {until}")

    def events(self, name):
        """Each event of a job as (id, name, data), until the stream ends."""
        connection = self.connect()
        connection.request("GET", f"/v1/videos/{name}/events",
                           headers={"Authorization": f"Bearer {self.key}"} if self.key else {})
        response = connection.getresponse()
        assert response.status == 200 and response.getheader("Content-Type").startswith("text/event-stream")
        event = {}
        try:
            while line := response.readline():
                line = line.decode().rstrip("\n")
                if line and not line.startswith(":"):
                    key, value = line.split(": ", 1)
                    event[key] = value
                elif not line and "data" in event:
                    yield int(event["id"]), event["event"], json.loads(event["data"])
                    event = {}
        finally:
            connection.close()

    def raw(self, data=b"", timeout=PATIENCE):
        """A socket that has sent these bytes."""
        other = socket.create_connection(("127.0.0.1", self.port), timeout=timeout)
        other.sendall(data)
        return other


def form(fields, files=()):
    """A body of multipart/form-data and its type. files: (name, file name, bytes)."""
    mark = "----esa-test-boundary"
    out = b""
    for name, value in fields:
        out += f'--{mark}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
    for name, title, data in files:
        out += (f'--{mark}\r\nContent-Disposition: form-data; name="{name}"; filename="{title}"\r\n'
                "Content-Type: application/octet-stream\r\n\r\n").encode() + data + b"\r\n"
    return out + f"--{mark}--\r\n".encode(), f"multipart/form-data; boundary={mark}"


def drain(other):
    """All that a socket still gives; b"" after a reset."""
    data = b""
    try:
        while piece := other.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


class Served(unittest.TestCase):
    """Tests that share one server, self.server, with the class's options. The class has `esa`, the command."""
    esa = ""
    options = ()
    env = None

    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.server = Server(cls.esa, os.path.join(cls.temporary.name, "out"), *kit.ONE, *cls.options, env=cls.env)

    @classmethod
    def tearDownClass(cls):
        status = cls.server.stop()
        said = cls.server.said()
        cls.temporary.cleanup()
        assert status == 0 and "Sanitizer" not in said, (status, said)

    def refused(self, status, answer, *words, param=None):
        """The answer is a refusal: a JSON error with this status and one sentence that holds the words."""
        self.assertEqual(answer.status, status, answer.body)
        self.assertEqual(answer.headers["content-type"], "application/json")
        error = answer.json["error"]
        self.assertEqual(set(error), {"code", "type", "message", "param"})
        self.assertEqual(error["code"], status)
        self.assertTrue(error["message"].endswith((".", "?.")) and "\n" not in error["message"], error)
        for word in words:
            self.assertIn(word, error["message"])
        if param is not None:
            self.assertEqual(error["param"], param, error)
        return error


def quoted(text):
    return urllib.parse.quote(text, safe="")
