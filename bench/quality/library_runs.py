# SPDX-License-Identifier: Apache-2.0
"""Runs of library.py: an EsaConfig written as words, with a name and the words of the study's same setting."""
import ast
import dataclasses
import re

from settings import BOTH, CARRY, EARLY, FREE, HIGH, LEAN, LOW, NEW, REC2, THIN, THINNER, swap
from spec import Spec

BUDGETS = (0.5, 0.3, 0.2, 0.1)          # of the former default
TODAY, TODAY_FREE = "today", "today, no dense calls"
# The engine cuts sequences of up to 8192 tokens into blocks of 64; esa.apply asks the selector, so it is said here.
SMALL = "block=64"
OLD_RULES = "warmup_frac=0.2 dense_first_layer=True"
OLD_REUSE = "refresh_every=1 order_every=1 share_branches=False"
OFF = "carry=off"                       # the results of these names are from before carry


@dataclasses.dataclass(frozen=True)
class Run:
    """words: fields of EsaConfig. study: words of the study's setting, empty if it has none."""
    name: str
    words: str
    study: str = ""

    def config(self):
        import esa
        return esa.EsaConfig(**values(self.words))

    def label(self):
        """The study's name of the same setting, or None."""
        return Spec.parse(self.study).label() if self.study else None


def _value(text):
    if re.fullmatch(r"\d+(x\d+)+", text):
        return tuple(int(x) for x in text.split("x"))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def values(words):
    """{field: value} of `work=0.44, block=64x64, order=hilbert`; commas or spaces between the words."""
    out = {}
    for word in filter(None, re.split(r"[,\s]+", words)):
        name, _, value = word.partition("=")
        if not value:
            raise ValueError(f"a word of a run is field=value, not {word!r}")
        if name in out:
            raise ValueError(f"{name} is given twice in {words!r}")
        out[name] = _value(value)
    return out


def parse(text):
    """Runs of `[name:] words [| words of the study]; ...`."""
    runs = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        part, _, study = part.partition("|")
        name, colon, words = part.rpartition(":")
        words = " ".join(filter(None, re.split(r"[,\s]+", words if colon else part)))
        values(words)
        run = Run(name.strip() or words, words, study.strip())
        run.label()
        runs.append(run)
    return runs


def today(budget):
    return Run(TODAY, f"budget={budget} {SMALL}", "base")


def today_free(work):
    return Run(TODAY_FREE, f"work={work} selector=entropy warmup_frac=0 dense_first_layer=False {SMALL}", FREE)


def new(work):
    return Run("new default", f"work={work} {OFF} {SMALL}", NEW)


def rows(work):
    return Run("new default, 4 exact rows", f"work={work} exact_rows=4 {OFF} {SMALL}", swap(NEW, resid=4))


def carried(work):
    """What a run of many steps does by itself."""
    return Run("carry", f"work={work} {SMALL}", CARRY)


def ideas(work):
    """One idea after the other, up to the new default."""
    error = f"work={work} selector=error {OFF} {SMALL}"
    plain = "exact_rows=0 order=hilbert"
    levels = "sel=errq8m4 bud=layer lev=64/8 osrc=block"
    order = f"sel=errq8m4 bud=layer lev=64/8 osrc=block {FREE} order=ad amet=0 leafq=4 leafk=4"
    return [
        Run("today, by work", f"work={work} selector=entropy {SMALL}", "base"),
        Run("error", f"{error} tail=pooled {plain} {OLD_RULES} {OLD_REUSE}", "sel=errq8m4 bud=layer osrc=block"),
        Run("error, levels", f"{error} tail=levels {plain} {OLD_RULES} {OLD_REUSE}", levels),
        Run("error, levels, no dense calls", f"{error} tail=levels {plain} {OLD_REUSE}", f"{levels} {FREE}"),
        Run("error, levels, no dense calls, reuse", f"{error} tail=levels {plain}",
            f"{levels} {FREE} refresh={EARLY} share=1"),
        Run("error, levels, no dense calls, adaptive order",
            f"{error} tail=levels exact_rows=0 order=adaptive {OLD_REUSE}", order),
        Run("error, levels, no dense calls, adaptive order, reuse", f"{error} tail=levels exact_rows=0 order=adaptive",
            swap(NEW, resid=0)),
        new(work),
        rows(work),
    ]


def apart(work):
    """The new default with one idea taken back."""
    return [
        Run("new, pooled tail", f"work={work} tail=pooled {OFF} {SMALL}", NEW.replace(" lev=64/8", "")),
        Run("new, Hilbert order", f"work={work} order=hilbert {OFF} {SMALL}",
            f"sel=errq8m4 bud=layer lev=64/8 osrc=block resid=2 {FREE} refresh={EARLY} share=1"),
        Run("new, dense steps and layer 0", f"work={work} {OLD_RULES} {OFF} {SMALL}", swap(NEW, warm=-1, l0=1)),
        Run("new, no reuse", f"work={work} {OLD_REUSE} {SMALL}", swap(NEW, refresh=1, oref=1, share=0)),
        Run("new, every second step", f"work={work} refresh_every=2 order_every=2 {SMALL}",
            swap(NEW, refresh=2, oref=2)),
        Run("new, no exact rows", f"work={work} exact_rows=0 {OFF} {SMALL}", swap(NEW, resid=0)),
        Run("new, masks of the first step", f"work={work} refresh_every=0 order_every=0 {SMALL}",
            swap(NEW, refresh=0, oref=0)),
        Run("new, blocks of 128", f"work={work} {OFF} block=128",
            swap(NEW, sel="errq16m4", lev="128/16", bq=128, bk=128)),
    ]


def plain(work):
    """Without a word about blocks, as a user writes it."""
    return Run("new default, own blocks", f"work={work} {OFF}")


def recorded(masks, budgets, step_map="exact"):
    """Masks of a file at every one of its budgets."""
    return [Run("recorded masks", f"masks={masks} budget={b:g} step_map={step_map}", REC2) for b in budgets]


MAIN = [today(0.1), new(LOW), new(HIGH), today(0.3), new(LEAN), today_free(LEAN)]
GROUPS = {
    "dense": [Run("dense through esa", "selector=dense")],
    "today": [today(b) for b in BUDGETS],
    "main": MAIN,
    "new": [new(w) for w in (HIGH, LOW, LEAN)],
    "carry": [run for w in (LOW, LEAN, THIN, THINNER) for run in (carried(w), new(w))],
    # A model of true size takes its own blocks.
    "judge": [Run(name, words) for w in (THIN, THINNER, LEAN) for name, words in (
        ("carry", f"work={w}"), ("new default", f"work={w} {OFF}"))] + [
            Run("new default", f"work={LOW} {OFF}"), Run(TODAY, "budget=0.1"),
            Run("dense through esa", "selector=dense")],
    "rows": [rows(w) for w in (LOW, HIGH, LEAN)],
    "ideas": [run for w in BOTH for run in ideas(w)],
    "apart": [run for w in BOTH for run in apart(w)],
    "plain": [*(plain(w) for w in (HIGH, LOW)), *(Run("today, own blocks", f"budget={b}") for b in (0.3, 0.1))],
    "other": [today(0.1), new(LOW), today(0.3), new(HIGH)],
}


def wanted(groups, text):
    """Runs of named groups (commas) and of --runs, each once."""
    runs = []
    for name in filter(None, groups.split(",")):
        if name not in GROUPS:
            raise ValueError(f"no group {name}; there are: {' '.join(GROUPS)}")
        runs += GROUPS[name]
    runs += parse(text)
    once = {}
    for run in runs:
        once.setdefault(run.words, run)
    return list(once.values())
