#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Experiments on a real Slurm: check_slurm.py ESA MODELS. Standard library only.

tests/slurm/cluster.sh starts munge, a controller and a node with four GPUs (that are files) on this machine; everything
is ended and removed afterwards. What the cluster makes must equal what one process makes. Status 77, with a line
that says why: this machine cannot run Slurm."""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
sys.path.insert(0, os.path.join(ROOT, "tests", "cli"))
import schemas  # noqa: E402

ESA, MODELS = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2])
BUDGETS = ["0.7", "0.5", "0.3", "0.2"]
# Clips of half a second: what is tested is who makes them, not what they show.
SMALL = [
    "--frames", "5", "--height", "64", "--width", "64", "--steps", "4", "--num-prompts", "2", "--eval-prompts", "3",
    "--threads", "1"
]
PATIENCE = 600                      # seconds until a job counts as stuck; all jobs together take about a minute
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}, "ESA_MODELS": MODELS}


def read(path):
    with open(path, "rb") as file:
        return file.read()


def call(*args, cwd, status=0, env=None):
    done = subprocess.run(list(map(str, args)), cwd=cwd, env={**ENV, **(env or {})}, capture_output=True, text=True,
                          timeout=PATIENCE)
    assert status is None or done.returncode == status, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def wait_for(condition, what):
    """Until the condition holds; a message about everything that is known when it never does."""
    end = time.time() + PATIENCE
    while time.time() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited in vain for {what}\n" +
                         subprocess.run(["squeue", "-a"], capture_output=True, text=True, env=ENV, check=False).stdout)


def jobs(*args):
    """scontrol show job as a list of dictionaries."""
    out = subprocess.run(["scontrol", "-o", "show", "job", *args], capture_output=True, text=True, env=ENV,
                         check=False).stdout
    return [
        dict(word.split("=", 1) for word in line.split() if "=" in word) for line in out.splitlines()
        if line.startswith("JobId=")
    ]


def wait_for_end(job):
    """The states of a job or of all tasks of an array, once all have ended."""
    def ended():
        tasks = jobs(job)
        states = [task["JobState"] for task in tasks]
        return states if states and not set(states) & {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"
                                                       } else None
    return wait_for(ended, f"the end of job {job}")


class Slurm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.mkdtemp(prefix="esa-slurm-")
        cls.addClassCleanup(shutil.rmtree, cls.scratch, ignore_errors=True)
        cluster = os.path.join(cls.scratch, "cluster")
        cls.addClassCleanup(subprocess.run, [os.path.join(HERE, "cluster.sh"), "stop", cluster], check=False)
        done = subprocess.run([os.path.join(HERE, "cluster.sh"), "start", cluster, "4"], capture_output=True, text=True,
                              check=False)
        if done.returncode:
            sys.stderr.write(done.stderr)
            cls.doClassCleanups()
            os._exit(77 if done.returncode == 77 else 1)
        ENV["SLURM_CONF"] = os.path.join(cluster, "slurm.conf")
        # A source tree as the scripts know it, with a command that says which GPU it was given.
        cls.tree = os.path.join(cls.scratch, "tree")
        shutil.copytree(os.path.join(ROOT, "experiments"), os.path.join(cls.tree, "experiments"))
        os.mkdir(os.path.join(cls.tree, "build"))
        with open(os.path.join(cls.tree, "build", "esa"), "w", encoding="utf-8") as file:
            file.write(f'#!/bin/bash\necho "job $SLURM_JOB_ID on GPU $CUDA_VISIBLE_DEVICES"\nexec {ESA} "$@"\n')
        os.chmod(os.path.join(cls.tree, "build", "esa"), 0o755)
        # The same experiments without Slurm, one budget after the other with one mask file.
        cls.plain = os.path.join(cls.scratch, "plain")
        os.mkdir(cls.plain)
        masks = os.path.join("results", "x", "masks.safetensors")
        call(ESA, "experiment", "run", "--tag", "x", "--budgets", ",".join(BUDGETS), *SMALL, "--masks", masks,
             "--only-calibrate", cwd=cls.plain)
        for budget in BUDGETS:
            call(ESA, "experiment", "run", "--tag", f"x-b{budget}", "--budget", budget, *SMALL, "--masks", masks,
                 "--skip-calibrate", cwd=cls.plain)

    def same_results(self, results, tags):
        """Complete, as the schemas say, and equal to the run without Slurm."""
        for tag, plain in tags.items():
            folder, other = os.path.join(results, tag), os.path.join(self.plain, "results", plain)
            for name in ("config", "speed", "quality"):
                schemas.check(os.path.join(folder, name + ".json"), "experiment-" + name)
            self.assertFalse(os.path.exists(os.path.join(folder, "work")), f"{tag} is not complete")
            quality, expected = (json.loads(read(os.path.join(f, "quality.json"))) for f in (folder, other))
            self.assertEqual({**quality, "tag": ""}, {**expected, "tag": ""})
            for top, _, files in os.walk(os.path.join(other, "videos")):
                for file in files:
                    path = os.path.relpath(os.path.join(top, file), other)
                    self.assertEqual(read(os.path.join(folder, path)), read(os.path.join(other, path)), (tag, path))

    def test_array(self):
        """Four budgets; one task is killed in the midst of its work and requeued, and goes on where it was."""
        where = os.path.join(self.scratch, "array")
        os.mkdir(where)
        out = call(ESA, "experiment", "submit", "--tag", "x", "--budgets", ",".join(BUDGETS), *SMALL, "--",
                   "--comment=passed-on", cwd=where).stdout
        calibration, array = (line.split()[1].rstrip(":") for line in out.splitlines())
        victim = os.path.join(where, "results", "x-b0.5")
        first = os.path.join(victim, "videos", "dense", "000.mp4")
        second = os.path.join(victim, "work", "clips", "b0.5-000.json")
        wait_for(lambda: os.path.exists(second), "the first two clips of the task that will be killed")
        task = next(job for job in jobs(array) if job["ArrayTaskId"] == "1")
        pids = subprocess.run(["scontrol", "listpids", task["JobId"]], capture_output=True, text=True, env=ENV,
                              check=False).stdout.splitlines()[1:]
        for line in pids:
            try:
                os.kill(int(line.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.assertTrue(pids)
        wait_for(lambda: jobs(task["JobId"])[0]["JobState"] == "FAILED", "the end of the killed task")
        self.assertFalse(os.path.exists(os.path.join(victim, "quality.json")))
        before = os.stat(first)
        call("scontrol", "requeue", task["JobId"], cwd=where)
        self.assertEqual(wait_for_end(array), ["COMPLETED"] * 4)
        self.assertEqual(jobs(calibration)[0]["JobState"], "COMPLETED")
        self.assertEqual(next(job for job in jobs(array) if job["ArrayTaskId"] == "1")["Restarts"], "1")
        self.assertEqual((os.stat(first).st_ino, os.stat(first).st_mtime_ns), (before.st_ino, before.st_mtime_ns),
                         "a finished clip was made again")
        results = os.path.join(where, "results")
        self.assertEqual(read(os.path.join(results, "x", "masks.safetensors")),
                         read(os.path.join(self.plain, "results", "x", "masks.safetensors")))
        self.same_results(results, {f"x-b{b}": f"x-b{b}" for b in BUDGETS})
        for job in jobs(array) + jobs(calibration):
            self.assertEqual((job["Comment"], job["TresPerNode"], job["NumCPUs"], job["TimeLimit"]),
                             ("passed-on", "gres:gpu:1", "8", "06:00:00"))
        logs = sorted(os.listdir(os.path.join(results, "x", "logs")))
        self.assertEqual(logs,
                         sorted([f"esa-x-calibrate-{calibration}.log"] + [f"esa-x-{array}_{i}.log" for i in range(4)]))
        # All of it in one table.
        call(ESA, "experiment", "collect", "--csv", "table.csv", cwd=where)
        with open(os.path.join(where, "table.csv"), encoding="utf-8") as file:
            rows = [line.split(",")[:4] for line in file.read().splitlines()[1:]]
        self.assertEqual(rows,
                         [[f"x-b{b}", "wan-tiny", "5x64x64", v] for b in sorted(BUDGETS) for v in ("dense", f"b{b}")])

    def test_failed_calibration_ends_the_array(self):
        where = os.path.join(self.scratch, "failed")
        os.mkdir(where)
        out = call(ESA, "experiment", "submit", "--tag", "bad", "--budgets", "0.5,0.3", *SMALL, "--height", "63",
                   "--gpus", "0", cwd=where).stdout
        calibration, array = (line.split()[1].rstrip(":") for line in out.splitlines())
        self.assertEqual(wait_for_end(calibration), ["FAILED"])
        self.assertEqual(set(wait_for_end(array)), {"CANCELLED"})
        self.assertFalse([job for job in jobs(calibration) if "gpu" in job.get("TresPerNode", "")])

    def test_launch_all(self):
        """Every preset through srun, all at once, each on its own GPU."""
        presets = os.path.join(self.scratch, "presets.txt")
        with open(presets, "w", encoding="utf-8") as file:
            file.write("# a remark\n\n")
            for budget in BUDGETS[:3]:
                file.write(f"launched-b{budget}  --budget {budget} {' '.join(SMALL)} "
                           f"--masks {self.plain}/results/x/masks.safetensors --skip-calibrate\n")
        results = os.path.join(self.scratch, "launched")
        script = os.path.join(self.tree, "experiments", "launch_all.sh")
        done = call("bash", script, presets, cwd=self.scratch, env={"RESULTS": results})
        self.assertEqual(done.stdout.count("done, results in"), 3, done.stdout)
        gpus = set()
        for budget in BUDGETS[:3]:
            log = read(os.path.join(self.tree, "experiments", "logs", f"launched-b{budget}.log")).decode()
            gpus.add(log.splitlines()[0].split()[-1])
        self.assertEqual(len(gpus), 3, f"GPUs {gpus}: each job needs one of its own")
        self.same_results(results, {f"launched-b{b}": f"x-b{b}" for b in BUDGETS[:3]})
        # Again: everything is there. And a preset that fails is named, the others run.
        with open(presets, "a", encoding="utf-8") as file:
            file.write("wrong --budget 2")
        done = call("bash", script, presets, cwd=self.scratch,
                    env={"RESULTS": results, "SRUN_OPTIONS": "--partition=main --quiet"}, status=1)
        self.assertEqual(done.stdout.count("done, results in"), 3, done.stdout)
        self.assertIn("wrong: FAILED", done.stdout)
        self.assertIn("1 of 4 failed", done.stderr)

    def test_job_script(self):
        """experiments/job.sbatch with settings from the environment, as arguments, and in the words of the
        original's manual."""
        rest = [*SMALL[4:], "--masks", f"{self.plain}/results/x/masks.safetensors", "--skip-calibrate"]
        script = ["sbatch", "--parsable"]
        setting = {"MODEL": "wan-tiny", "HEIGHT": "64", "WIDTH": "64", "FRAMES": "5"}
        ids = [
            call(*script, "experiments/job.sbatch", *rest, cwd=self.tree,
                 env={**setting, "BUDGET": "0.7", "TAG": "from-environment"}).stdout,
            call(*script, "--job-name=esa-args", "experiments/job.sbatch", "MODEL=wan-tiny", "HEIGHT=64", "WIDTH=64",
                 "BUDGET=0.5", "TAG=from-arguments", "FRAMES=5", *rest, cwd=self.tree).stdout,
            call(*script, "--job-name=esa-b0.3", "experiments/job.sbatch", "--export=ALL,BUDGET=0.3", *rest,
                 cwd=self.tree, env=setting).stdout
        ]
        for job in map(str.strip, ids):
            self.assertEqual(wait_for_end(job), ["COMPLETED"], read_logs(self.tree))
            job = jobs(job)[0]
            self.assertEqual((job["NumCPUs"], job["MinMemoryNode"], job["TimeLimit"], job["TresPerNode"]),
                             ("8", "64G", "06:00:00", "gres:gpu:1"))
        tags = {"from-environment": "x-b0.7", "from-arguments": "x-b0.5", "wan-tiny-64p-b0.3": "x-b0.3"}
        self.same_results(os.path.join(self.tree, "results"), tags)
        logs = os.listdir(os.path.join(self.tree, "experiments", "logs"))
        for name, job in zip(("esa-experiment", "esa-args", "esa-b0.3"), map(str.strip, ids)):
            self.assertIn(f"{name}-{job}.log", logs)


def read_logs(tree):
    folder = os.path.join(tree, "experiments", "logs")
    return "\n".join(read(os.path.join(folder, name)).decode() for name in os.listdir(folder))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
