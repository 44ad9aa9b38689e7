#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the commands write as JSON is what docs/schemas says: check_schemas.py ESA MAKE_RECORDING STAND_IN MODELS
[--video].

--video: the engine was built, so its commands must write theirs too. Commands with tests of their own check their files
there, with the same module (schemas.py): calibrate, bench model, evaluate, experiment, report."""
import copy
import json
import os
import subprocess
import sys
import tempfile
import unittest

import kit
import schemas

ESA, MAKE_RECORDING, STAND_IN, MODELS = map(os.path.abspath, sys.argv[1:5])
VIDEO = "--video" in sys.argv
KEYWORDS = {
    "$schema", "$id", "$ref", "$defs", "title", "description", "type", "enum", "const", "anyOf", "properties",
    "required", "additionalProperties", "items", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum",
    "pattern", "minLength"
}


def every(value, path=()):
    """Every object in a JSON value with the way to it."""
    if isinstance(value, dict):
        yield path, value
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from every(entry, path + (key,))


class Schemas(unittest.TestCase):
    """The documents themselves."""

    def rules(self, rule, name):
        """Walks a schema: known keywords only, so that no misspelt one is passed over, and objects that are closed."""
        if isinstance(rule, bool):
            return
        self.assertLessEqual(set(rule), KEYWORDS, name)
        if rule.get("type") == "object":
            self.assertIn("additionalProperties", rule, f"{name}: an object that takes anything")
            self.assertLessEqual(set(rule.get("required", [])), set(rule.get("properties", {})), name)
        for key in ("properties", "$defs"):
            for entry in rule.get(key, {}).values():
                self.rules(entry, name)
        for entry in [rule.get("items", True), *rule.get("anyOf", [])]:
            self.rules(entry, name)

    def test_documents(self):
        self.assertIn("common", schemas.names())
        for name in schemas.names():
            root = schemas.schema(name)
            self.assertEqual(root["$schema"], "https://json-schema.org/draft/2020-12/schema", name)
            self.assertTrue(root["title"] and root["description"], name)
            schemas.jsonschema.Draft202012Validator.check_schema(root)
            self.rules(root, name)

    def test_list(self):
        """The table of docs/schemas/README.md names every file, and nothing else."""
        with open(os.path.join(schemas.FOLDER, "README.md"), encoding="utf-8") as file:
            listed = [line.split("`")[1] for line in file if line.startswith("| `")]
        self.assertEqual(sorted(listed), [name + ".schema.json" for name in schemas.names() if name != "common"])


class Files(unittest.TestCase):
    """What the commands write."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = folder.name

    def path(self, name):
        return os.path.join(self.dir, name)

    def run_esa(self, *args, env=None):
        done = subprocess.run([ESA, *map(str, args)], cwd=self.dir,
                              env={**os.environ, "ESA_MODELS": MODELS, **(env or {})}, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, f"{args}: {done.stderr}")

    def written(self, name, *args, env=None):
        """Runs a command with --json, checks the file, and that the schema holds on to every part of it."""
        self.run_esa(*args, "--json", "out.json", env=env)
        data = schemas.check(self.path("out.json"), name)
        for path, _ in every(data):
            for change in ("more", "less", "other"):
                broken = copy.deepcopy(data)
                at = broken
                for step in path:
                    at = at[step]
                if change == "more":
                    at["surprise"] = 1
                elif change == "less" and at:
                    del at[next(iter(at))]
                elif at:
                    at[next(iter(at))] = [[]]
                with open(self.path("broken.json"), "w", encoding="utf-8") as file:
                    json.dump(broken, file)
                with self.assertRaises(schemas.Wrong, msg=f"{name}: {change} at {path}"):
                    schemas.check(self.path("broken.json"), name)
        return data

    def test_doctor(self):
        self.written("doctor", "doctor")
        data = self.written("doctor", "doctor", env={"ESA_CUDA_LIB": STAND_IN})
        self.assertTrue(data["gpus"])

    def test_demo(self):
        self.written("demo", "demo", "--grid", "3,8,8", "--heads", 2, "--dim", 32, "--rounds", 1, "--budget", 0.5)

    def test_bench_attention(self):
        shape = ["bench", "attention", "--shape", "1,2,512,64", "--rounds", 1]
        self.written("bench-attention", *shape)
        self.written("bench-attention", *shape, "--density", "1,0.5", "--selector", "random,entropy", "--tail",
                     "none,pooled", "--dtype", "f32,bf16")
        data = self.written("bench-attention", *shape, "--density", "1,0.5", "--dtype", "bf16", "--device", "cuda",
                            env={"ESA_CUDA_LIB": STAND_IN})
        self.assertIn("gpu", data)

    def test_masks_info(self):
        subprocess.run([MAKE_RECORDING, self.path("r"), "1", "1"], check=True)
        self.run_esa("masks", "merge", "r", "--out", "m")
        self.written("masks-info", "masks", "info", "m")
        self.written("masks-info", "masks", "info", "m", "--layer", 1, "--step", 3)

    def test_generate(self):
        if not VIDEO:
            kit.skip(self, "the engine was not built")
        small = ["generate", "--frames", 5, "--height", 64, "--width", 64, "--steps", 2]
        self.written("generate", *small, "--method", "dense", "--out", "a.y4m")
        data = self.written("generate", *small, "--compare", "dense", "--device", "cpu", "--out", "b.y4m")
        self.assertEqual(data["device"], {"kind": "cpu"})
        data = self.written("generate", *small, "--method", "dense", "--device", "cuda", "--out", "c.y4m",
                            env={"ESA_CUDA_LIB": STAND_IN})
        self.assertEqual((data["device"]["kind"], data["device"]["gpu"]["name"]), ("cuda", "stand-in"))
        self.assertEqual(data["memory"]["resident_blocks"], data["memory"]["blocks"])
        self.assertGreater(data["videos"][0]["device_peak_bytes"], data["memory"]["weights_bytes"])

    def test_not_strict(self):
        for text in ("{", '{"a": NaN}', '{"a": 1, "a": 2}', ""):
            with open(self.path("x.json"), "w", encoding="utf-8") as file:
                file.write(text)
            with self.assertRaises(schemas.Wrong):
                schemas.check(self.path("x.json"), "doctor")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
