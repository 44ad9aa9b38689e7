# SPDX-License-Identifier: Apache-2.0
"""What a command may leave when it failed or was ended, for check_faults.py and check_kills.py. Standard library only.
Run as a program it plants wrong commands, and each must be found."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
from outcome import TEMPORARY, contents, fill

SECONDS = 120           # a hundred times what a run takes: a command that is slow on a busy machine does not hang
INTERRUPTED = 130       # a command that a signal asked to end, and that ended by itself


class Ended:
    """How a run ended. status None: it did not."""

    def __init__(self, words, folder, env, seconds):
        try:
            done = subprocess.run(list(map(str, words)), cwd=folder, env=env, capture_output=True, timeout=seconds)
            self.status, self.err = done.returncode, done.stderr.decode(errors="replace")
        except subprocess.TimeoutExpired:
            self.status, self.err = None, ""


def names_below(folder, left_out):
    """Files and folders below a folder, but nothing below a result."""
    for name in sorted(os.listdir(folder)):
        if name in left_out:
            continue
        yield name
        if os.path.isdir(os.path.join(folder, name)):
            yield from (name + "/" + inner for inner in names_below(os.path.join(folder, name), ()))


def agrees(found, wanted):
    """Whether JSON is what a run without faults writes. null stands for what the system did not tell."""
    if found is None:
        return True
    if isinstance(wanted, dict):
        return isinstance(found, dict) and found.keys() == wanted.keys() and all(
            key in ("machine", "commit", "note", "notes") or agrees(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(agrees, found, wanted))
    return found == wanted if isinstance(wanted, str) else isinstance(found, (int, float))


def same(name, data, wanted, err=""):
    """Whether a result is the one of a run without faults."""
    if name == "page.html" and "note: " in err:       # says which videos the page could not show
        return (data or b"").endswith(b"</html>\n")
    if not name.endswith(".json"):
        return data == wanted
    try:
        found = json.loads(data or b"")
    except ValueError:
        return False
    return found is not None and (name == "d.json" or agrees(found, json.loads(wanted)))


def complaints(run, made, results, before, final, resumed=None, sent=0, there=()):
    """What is wrong with a run that has ended: sentences. made: the folder of the results; before, final: what stood
    there, and what a run without faults writes; resumed: a folder that a failed run may leave, for the next to go on
    there; sent: a signal it got; there: what an earlier run that died had left."""
    found = []
    died = sent and run.status == -sent
    if run.status is None:
        found.append("it did not end")
    elif run.status not in (0, 1, 2) and not died and not (sent and run.status == INTERRUPTED):
        found.append(f"it ended with status {run.status}")
    messages = [line for line in run.err.splitlines() if line.startswith("esa: ")]
    many = any(line.startswith("esa: doctor: ") for line in messages)        # one for each thing that it finds wrong
    if run.status in (1, 2) and (not (many or len(messages) == 1) or min(map(len, messages)) < len("esa: a reason")):
        found.append(f"status {run.status} without one message")
    for name in results:
        data = contents(os.path.join(made, name))
        whole = same(name, data, final[name], run.err)
        if run.status == 0 and not whole:
            found.append(f"status 0, but {name} is {'missing' if data is None else 'another'}")
        elif not whole and data != before[name]:
            found.append(f"{name} is neither the old one nor the new one")
    if not os.path.isdir(made):
        return [*found, "the folder of the results is gone"]
    for name in names_below(made, results):
        top = name.split("/")[0]
        kept = resumed and top == resumed and (run.status or f"{top}' could not be removed" in run.err) and \
            not TEMPORARY.search(name)
        if not kept and name not in there and not (died and (top == resumed or TEMPORARY.search(top))):
            found.append(f"{name} was left there")
    return found


class Planted(unittest.TestCase):
    """Commands of a shell that do what none may do, and one that does it right."""
    SAYS = "echo 'esa: export: the disk is full' >&2; "
    WRONG = [
        ("status -11", "kill -SEGV $$"),
        ("did not end", "exec sleep 60"),
        ("status 3", SAYS + "exit 3"),
        ("without one message", "exit 1"),
        ("without one message", "echo esa: >&2; exit 1"),
        ("without one message", SAYS + SAYS + "exit 1"),
        ("status 0, but r is missing", "exit 0"),
        ("status 0, but r is another", "echo other >out/r"),
        ("r is neither the old one nor the new one", SAYS + "printf ne >out/r; exit 1"),
        ("y was left", "echo new >out/r; echo x >out/y"),
        ("r.00c0ffee.tmp was left", SAYS + "echo x >out/r.00c0ffee.tmp; exit 1"),
        ("r.part/a.00c0ffee.tmp was left", SAYS + "mkdir out/r.part; echo x >out/r.part/a.00c0ffee.tmp; exit 1"),
        ("r.part was left there", "echo new >out/r; mkdir out/r.part"),
        ("the folder of the results is gone", SAYS + "rm -r out; exit 1"),
    ]
    RIGHT = ["echo new >out/r", SAYS + "exit 1", SAYS + "mkdir out/r.part; exit 1", SAYS + "echo new >out/r; exit 2",
             "echo new >out/r; mkdir out/r.part; echo \"note: 'out/r.part' could not be removed\" >&2"]

    def judge(self, script, folder, sent=0):
        made = os.path.join(folder, "out")
        fill(made, {})
        run = Ended(["bash", "-c", script], folder, dict(os.environ), 1 if "sleep" in script else SECONDS)
        return complaints(run, made, ["r"], {"r": None}, {"r": b"new\n"}, "r.part", sent)

    def test_wrong_commands_are_found(self):
        with tempfile.TemporaryDirectory() as folder:
            for words, script in self.WRONG:
                self.assertIn(words, "; ".join(self.judge(script, folder)), script)
            for script in self.RIGHT:
                self.assertEqual(self.judge(script, folder), [], script)

    def test_only_the_killed_leave_temporary_files(self):
        leave, kill = "echo x >out/r.00c0ffee.tmp; ", "kill -TERM $$"
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(self.judge(leave + kill, folder, signal.SIGTERM), [])
            self.assertEqual(self.judge("exit 130", folder, signal.SIGTERM), [])
            for script in (leave + "exit 130", "echo x >out/r; " + kill, "echo x >out/y; " + kill, "kill -SEGV $$"):
                self.assertEqual(len(self.judge(script, folder, signal.SIGTERM)), 1, script)

    def test_json(self):
        wanted = b'{"machine": {"cpu": "a"}, "bytes": 3, "files": ["x"]}'
        for text, good in ((b'{"machine": null, "bytes": 4, "files": ["x"]}', True),
                           (b'{"machine": {}, "bytes": null, "files": ["x"]}', True),
                           (b'{"machine": {}, "bytes": 3, "files": ["y"]}', False),
                           (b'{"machine": {}, "bytes": 3, "files": []}', False),
                           (b'{"machine": {}, "bytes": 3}', False), (b'{"machine": {}, "by', False), (b"", False)):
            self.assertEqual(same("r.json", text, wanted), good, text)


if __name__ == "__main__":
    unittest.main()
